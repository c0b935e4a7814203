"""Ranks that share a model: requests get the tokens that one gives, and the same bits whatever runs
beside them or dies.
"""

from __future__ import annotations

import functools
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from crowd import OVERRIDES, PROCESSORS, Answer, Ask, answer, answer_alone, answer_through, list_asks
from decoders import add_tokenizer, make_decoder
from quire import LLM
from quire.frontend.models.model_folder import POCKET, POCKET_ENCODER
from quire.frontend.options.engine_args import EngineArgs

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
CUTS = {
    "ranks": RANKS,
    "stages": STAGES,
    "both": RANKS | STAGES,
    "ranks-int8-cache": RANKS | {"kv_cache_dtype": "int8"},
}
# Of models whose layers are in groups by their windows, of latents, and of recurrent states.
OTHERS = {
    "groups": ("gpt-oss", RANKS),
    "groups in stages": ("gpt-oss", STAGES),
    "groups of both in 8 bits": ("gpt-oss", RANKS | STAGES | {"kv_cache_dtype": "fp8"}),
    "uneven groups in stages": ("gemma4", STAGES),
    "latents": ("deepseek_v3", RANKS),
    "latents in stages": ("deepseek_v3", STAGES),
    "latents in 8 bits": ("deepseek_v3", RANKS | {"kv_cache_dtype": "int8"}),
    "states": ("bamba", RANKS),
    "states in stages": ("bamba", STAGES),
    "latents of both in int4": ("deepseek_v3", RANKS | STAGES | {"quantization": "int4"}),
}
NUM_LAYERS = 4  # of a random model: each of two stages has layers of each group


def make_llm(dtype: str = "float32", model: str = POCKET, **changes: Any) -> LLM:
    """Of a decoder that generates and embeds."""
    fields: dict[str, Any] = {"num_gpu_blocks_override": 2048, "max_model_len": 512, "max_logprobs": -1}
    fields |= {
        "runner": "generate",
        "convert": "embed",
        "logits_processors": PROCESSORS,
        "hf_overrides": OVERRIDES,
    }
    return LLM(model, dtype=dtype, exact=True, **(fields | changes))


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


def parametrize(*usual: str) -> pytest.MarkDecorator:
    """By way of `cut`; the default suite has the usual ones."""
    names = [*CUTS, *OTHERS]
    return pytest.mark.parametrize(
        "cut",
        [pytest.param(name, marks=[] if name in usual else [pytest.mark.slow]) for name in names],
        indirect=True,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Makes each random model once."""

    @functools.cache
    def find(name: str) -> str:
        folder = tmp_path_factory.mktemp("ranks") / name
        return str(
            add_tokenizer(make_decoder(folder, name, vocab_size=2048, num_hidden_layers=NUM_LAYERS).folder)
        )

    return find


@pytest.fixture
def cut(request: pytest.FixtureRequest, folders: Callable[[str], str]) -> dict[str, Any]:
    """A model and how it is cut."""
    if request.param in CUTS:
        return {"model": POCKET, **CUTS[request.param]}
    name, parts = OTHERS[request.param]
    return {"model": folders(name), **parts}


@functools.cache
def answer_whole(**fields: Any) -> dict[str, Answer]:
    """What a worker answers that has all of the model."""
    with make_llm(distributed_executor_backend="uni", **fields) as llm:
        return answer(llm, choose(list_asks()))


# Of stages by themselves: test_rank_faults.py has both, test_stage_models.py the bits.
@parametrize("ranks", "groups of both in 8 bits")
def test_ranks_give_the_tokens_of_one_alone_and_in_a_crowd(cut: dict[str, Any]) -> None:
    asks = list_asks()
    some = choose(asks)
    assert len(some) == len(KINDS)
    sizes = RANKS | STAGES
    num_workers = math.prod(cut.get(name, 1) for name in sizes)
    whole = answer_whole(model=cut["model"])
    with make_llm(enable_prefix_caching=False, **cut) as llm:
        workers = [f"worker-{number}" for number in range(num_workers)]
        assert sorted(llm.llm_engine.facts.pids) == ["core", *workers]
        assert llm.llm_engine.facts.batch_variance_reason == ""
        alone = answer_alone(llm, some)
        crowd = answer(llm, asks)
    for name, found in alone.items():
        assert crowd[name] == found
        # Ranks' sums differ in their last bits, which may make another code; int4's groups are a rank's own.
        if cut.keys().isdisjoint(("kv_cache_dtype", "quantization")):
            assert_alike(found, whole[name])
    if "tensor_parallel_size" not in cut:  # nothing is added up that was not added up before
        assert alone == whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@parametrize()
def test_chunks_preemptions_and_lost_processes_change_no_bit_of_ranks(
    cut: dict[str, Any], dtype: str
) -> None:
    asks = list_asks()
    with make_llm(dtype, enable_prefix_caching=False, **cut) as llm:
        alone = answer_alone(llm, asks)
    has_windows = len(EngineArgs(**cut).create_engine_config().model.spec.kv_windows) > 1
    sizes = {"num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 128}
    sizes |= {"max_num_batched_tokens": 32} if has_windows else {}
    with make_llm(dtype, **sizes, **cut) as llm:
        assert answer(llm, asks) == alone
        assert llm.stats().num_preemptions_total > (8 if cut["model"] == POCKET else 0)
    with make_llm(dtype, max_num_batched_tokens=48, max_num_seqs=32, **cut) as llm:

        def kill(role: str) -> None:
            os.kill(llm.llm_engine.facts.pids[role], signal.SIGKILL)

        accidents = [partial(kill, role) for role in ("worker-1", "core", "worker-0")]
        assert answer_through(llm, asks, accidents) == alone


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_ranks_embed_as_one(cut: dict[str, Any]) -> None:
    texts = ["What did the fox find?", "It found a red ball beside the river. " * 9]
    vectors: list[list[list[float]]] = []
    for changes in ({}, cut):
        with LLM(POCKET_ENCODER, dtype="float32", **changes) as llm:
            vectors.append([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5)
