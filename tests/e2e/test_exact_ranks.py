"""Ranks that share a model: requests get the tokens that one gives, and the same bits whatever runs
beside them or dies.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest
from crowd import OVERRIDES, PROCESSORS, Answer, Ask, answer, answer_alone, answer_through, list_asks
from quire import LLM
from quire.frontend.models.model_folder import POCKET, POCKET_ENCODER

# Kinds that differ in what rank 0 has alone, or in what all ranks have to do for it.
KINDS = {
    "sampled",
    "penalized",
    "several",
    "with_prompt_logprobs",
    "stopped",
    "processed",
    "with_logprobs_of_ids",
}
KINDS |= {"embedded", "embedded_by_token", "searched", "constrained", "thinking"}

pytestmark = pytest.mark.usefixtures("library")


RANKS = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
CUTS = [
    pytest.param(RANKS, id="ranks"),
    pytest.param(STAGES, id="stages"),
    pytest.param(RANKS | STAGES, id="both"),
    pytest.param(RANKS | {"kv_cache_dtype": "int8"}, id="ranks-int8-cache"),
]


def make_llm(dtype: str = "float32", **changes: Any) -> LLM:
    """Of a decoder that generates and embeds."""
    fields: dict[str, Any] = {"num_gpu_blocks_override": 2048, "max_model_len": 512, "max_logprobs": -1}
    fields |= {
        "runner": "generate",
        "convert": "embed",
        "logits_processors": PROCESSORS,
        "hf_overrides": OVERRIDES,
    }
    return LLM(POCKET, dtype=dtype, exact=True, **(fields | changes))


def choose(asks: list[Ask]) -> list[Ask]:
    """One of each kind of KINDS."""
    return [ask for ask in asks if ask.number == 1 and ask.kind in KINDS]


def assert_alike(actual: Answer, expected: Answer) -> None:
    """The same tokens, or nearly the same vectors."""
    if isinstance(actual, bytes):
        assert isinstance(expected, bytes)
        vectors = [np.frombuffer(raw, np.float32) for raw in (actual, expected)]
        np.testing.assert_allclose(*vectors, rtol=0, atol=1e-4)
    else:
        assert [one[:4] for one in actual[0]] == [one[:4] for one in expected[0]]


@pytest.fixture(scope="module")
def whole() -> dict[str, Answer]:
    """What a worker answers that has all of the model."""
    with make_llm(distributed_executor_backend="uni") as llm:
        return answer(llm, choose(list_asks()))


# Of stages by themselves: test_rank_faults.py has both, test_stage_models.py the bits.
@pytest.mark.parametrize("cut", [CUTS[0], pytest.param(STAGES, id="stages", marks=pytest.mark.slow)])
def test_ranks_give_the_tokens_of_one_alone_and_in_a_crowd(
    whole: dict[str, Answer], cut: dict[str, Any]
) -> None:
    asks = list_asks()
    some = choose(asks)
    assert len(some) == len(KINDS)
    with make_llm(enable_prefix_caching=False, **cut) as llm:
        assert sorted(llm.llm_engine.facts.pids) == ["core", "worker-0", "worker-1"]
        assert llm.llm_engine.facts.batch_variance_reason == ""
        alone = answer_alone(llm, some)
        crowd = answer(llm, asks)
    for name, found in alone.items():
        assert_alike(found, whole[name])
        assert crowd[name] == found
    if cut == STAGES:  # nothing is added up that was not added up before
        assert alone == whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", CUTS)
def test_chunks_preemptions_and_lost_processes_change_no_bit_of_ranks(
    cut: dict[str, Any], dtype: str
) -> None:
    asks = list_asks()
    with make_llm(dtype, enable_prefix_caching=False, **cut) as llm:
        alone = answer_alone(llm, asks)
    with make_llm(dtype, num_gpu_blocks_override=24, block_size=8, max_model_len=128, **cut) as llm:
        assert answer(llm, asks) == alone
        assert llm.stats().num_preemptions_total > 8
    with make_llm(dtype, max_num_batched_tokens=48, max_num_seqs=32, **cut) as llm:

        def kill(role: str) -> None:
            os.kill(llm.llm_engine.facts.pids[role], signal.SIGKILL)

        accidents = [partial(kill, role) for role in ("worker-1", "core", "worker-0")]
        assert answer_through(llm, asks, accidents) == alone


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_ranks_embed_as_one(cut: dict[str, Any]) -> None:
    texts = ["What did the fox find?", "It found a red ball beside the river. " * 9]
    vectors: list[list[list[float]]] = []
    for changes in ({}, cut):
        with LLM(POCKET_ENCODER, dtype="float32", **changes) as llm:
            vectors.append([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5)
