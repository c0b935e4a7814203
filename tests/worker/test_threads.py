"""The thread rule: small models use one thread until a step has tokens to share; others use all."""

from __future__ import annotations

import pytest
from quire.worker.threads import MAX_SINGLE_THREAD_WEIGHT_BYTES, ThreadRule, count_cores

SMALL_BYTES, NUM_PARAMS = 6_400_000, 3_200_000


@pytest.mark.parametrize(("num_tokens", "is_one"), [(1, True), (31, True), (32, False), (512, False)])
def test_a_small_model_uses_one_thread_until_tokens_can_be_shared(num_tokens: int, is_one: bool) -> None:
    expected = 1 if is_one else count_cores()
    assert ThreadRule(None, SMALL_BYTES, NUM_PARAMS).choose(num_tokens) == expected


def test_a_step_of_little_work_uses_one_thread_whatever_its_tokens() -> None:
    rule = ThreadRule(None, 200_000, 100_000)
    assert rule.choose(400) == 1
    assert rule.choose(600) == count_cores()


def test_a_model_that_fits_no_cache_uses_all_cores_and_a_request_is_taken_as_it_is() -> None:
    assert ThreadRule(None, MAX_SINGLE_THREAD_WEIGHT_BYTES + 1, NUM_PARAMS).choose(1) == count_cores()
    assert ThreadRule(3, SMALL_BYTES, NUM_PARAMS).choose(1) == 3
