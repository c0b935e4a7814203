"""The bench's workloads, floors and tables: what is measured is what the labels say."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.tools.bench.contest import JobResult
from quire.tools.bench.floors import MachineRates, ModelSize, compute_floor_s
from quire.tools.bench.model_facts import ModelFacts
from quire.tools.bench.offline import (
    QUIRE,
    Measurement,
    Measurements,
    OfflineOptions,
    describe_prefix_reuse,
    format_results,
)
from quire.tools.bench.table import format_rate, format_table
from quire.tools.bench.workloads import (
    MAX_TOTAL_LEN,
    SHARED_PREFIX_LEN,
    WORKLOADS,
    BenchRequest,
    Workload,
    cut_outputs,
    make_workload,
    take_sample,
)

VOCAB_SIZE = 2048


@pytest.mark.parametrize("name", WORKLOADS)
def test_contents_change_the_ids_and_nothing_else(name: str) -> None:
    one, again, other = (make_workload(name, VOCAB_SIZE, contents) for contents in ("a", "a", "b"))
    assert one == again
    assert [len(r.prompt_token_ids) for r in one.requests] == [
        len(r.prompt_token_ids) for r in other.requests
    ]
    assert [r.num_output_tokens for r in one.requests] == [r.num_output_tokens for r in other.requests]
    for mine, theirs in zip(one.requests, other.requests, strict=True):
        assert mine.prompt_token_ids[:16] != theirs.prompt_token_ids[:16], "a warm-up would warm its cache"
    assert one.max_total_len <= MAX_TOTAL_LEN
    assert all(0 <= token < VOCAB_SIZE for r in one.requests for token in r.prompt_token_ids)


def test_the_workloads_are_as_large_as_they_say() -> None:
    w1, w2, w3, w4 = (make_workload(name, VOCAB_SIZE, "") for name in WORKLOADS)
    assert [len(w.requests) for w in (w1, w2, w3, w4)] == [1, 32, 16, 256]
    assert (w1.num_prompt_tokens, w1.num_output_tokens) == (128, 128)
    assert all(32 <= len(r.prompt_token_ids) <= 256 and 16 <= r.num_output_tokens <= 128 for r in w2.requests)
    assert all(32 <= len(r.prompt_token_ids) <= 64 and 32 <= r.num_output_tokens <= 64 for r in w4.requests)
    assert w3.num_prompt_tokens == 16 * (SHARED_PREFIX_LEN + 32)
    prefixes = {tuple(r.prompt_token_ids[:SHARED_PREFIX_LEN]) for r in w3.requests}
    assert len(prefixes) == 1
    assert len({tuple(r.prompt_token_ids) for r in w3.requests}) == 16


def test_a_sample_is_spread_over_the_workload_and_cuts_only_lengths() -> None:
    workload = Workload("W", [BenchRequest([index], 10 + index) for index in range(8)])
    assert [r.prompt_token_ids[0] for r in take_sample(workload, 4).requests] == [0, 2, 4, 6]
    assert take_sample(workload, 8) == workload
    assert [r.num_output_tokens for r in cut_outputs(workload, 12).requests] == [10, 11, *[12] * 6]


def test_a_floor_is_reading_the_weights_each_step_plus_the_prefill() -> None:
    size = ModelSize(num_layer_params=100, num_head_params=20, bytes_per_param=2)
    rates = MachineRates(read_bytes_per_s=240.0, bf16_flops_per_s=1e6)
    alone = Workload("W", [BenchRequest([1] * 10, 5)])
    # 10 prompt tokens of 200 flops, then 4 steps that read 240 bytes each (240 flops are far less).
    assert compute_floor_s(alone, size, rates, has_shared_prefix=False) == pytest.approx(0.002 + 4.0)


def test_a_shared_prefix_counts_once_in_the_floor() -> None:
    size = ModelSize(num_layer_params=100, num_head_params=20, bytes_per_param=2)
    rates = MachineRates(read_bytes_per_s=1e12, bf16_flops_per_s=200.0)
    workload = Workload("W3", [BenchRequest([1] * (SHARED_PREFIX_LEN + 8), 1)] * 3)
    seconds = compute_floor_s(workload, size, rates, has_shared_prefix=True)
    assert seconds == pytest.approx(SHARED_PREFIX_LEN + 3 * 8)


def test_a_rate_is_a_median_and_a_sample_is_marked() -> None:
    results = [JobResult(seconds=s, num_requests=2, num_output_tokens=100) for s in (1.0, 2.0, 10.0)]
    assert Measurement(results, num_requests_of=2).rate == 50.0
    assert not Measurement(results, num_requests_of=2).is_sample
    assert Measurement(results, num_requests_of=3).is_sample
    assert Measurement().rate is None


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [(15 * SHARED_PREFIX_LEN, "computed once"), (14 * SHARED_PREFIX_LEN, "NOT comp")],
)
def test_a_prefix_that_is_computed_twice_is_told(cached: int, verdict: str) -> None:
    result = JobResult(seconds=1.0, num_requests=16, num_output_tokens=512, num_cached_tokens=cached)
    measurements = {"W3": {QUIRE: Measurement([result], num_requests_of=16)}}
    (line,) = describe_prefix_reuse(measurements)
    assert f"prefix {verdict}" in line


def test_tables_line_up() -> None:
    table = format_table(["name", "x"], [["a", "1,000"], ["longer", "2"]])
    assert table.splitlines() == ["name        x", "------  -----", "a       1,000", "longer      2"]


@pytest.mark.parametrize(("value", "text"), [(8.618, "8.62"), (86.18, "86.2"), (8618.2, "8,618")])
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert format_rate(value) == text


def test_a_peer_that_ran_one_slow_round_is_marked() -> None:
    slow = JobResult(seconds=99.0, num_requests=1, num_output_tokens=128)
    measurements: Measurements = {
        "W1": {QUIRE: Measurement([slow] * 3, 1), "transformers-static": Measurement([slow], 1)}
    }
    options = OfflineOptions(workloads=("W1",), peers=("transformers-static",), rounds=3)
    facts = ModelFacts("m", Path("m"), 2048, "bf16", 1, ModelSize(1, 1, 2))
    table = format_results(options, facts, measurements, rates=None)
    assert table.count("1.29") == 2
    assert table.count("1.29'") == 1
    assert "1.00x" in table
    assert "' one round only" in table


def test_a_contestant_that_failed_is_told_and_has_no_ratio() -> None:
    measurements: Measurements = {"W1": {QUIRE: Measurement(error="quire: out of memory")}}
    options = OfflineOptions(workloads=("W1",), peers=(), rounds=3)
    facts = ModelFacts("m", Path("m"), 2048, "bf16", 1, ModelSize(1, 1, 2))
    table = format_results(options, facts, measurements, rates=None)
    assert "failed" in table
    assert "W1 quire failed: quire: out of memory" in table
