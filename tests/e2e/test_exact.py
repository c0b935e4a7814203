"""Exact replays: a request's tokens and logprobs are the same bit for bit, whatever runs beside it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from quire import LLM, SamplingParams
from quire.ipc.errors import ConfigError
from quire.kernels.native import SWITCH, cache_folder

STORY = "Once upon a time there was a little fox who lived near the river with her mother and her brothers. "
PROMPTS = [STORY * (1 + i % 3) + f"On day {i} the fox" for i in range(64)]
PARAMS = [
    SamplingParams(
        temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=6 + i % 5, ignore_eos=True, logprobs=2
    )
    for i in range(64)
]
NUM_ALONE = 4  # requests that are also run one at a time

Replay = list[tuple[list[int], list[dict[int, float]]]]


def make_llm(dtype: str, **changes: Any) -> LLM:
    return LLM(
        dtype=dtype,
        exact=True,
        max_model_len=512,
        num_gpu_blocks_override=2048,
        distributed_executor_backend="uni",
        **changes,
    )


def generate(llm: LLM, first: int, count: int) -> Replay:
    outputs = llm.generate(PROMPTS[first : first + count], PARAMS[first : first + count], use_tqdm=False)
    replays: Replay = []
    for output in outputs:
        sequence = output.outputs[0]
        assert sequence.logprobs is not None
        values = [{token: entry.logprob for token, entry in step.items()} for step in sequence.logprobs]
        replays.append((list(sequence.token_ids), values))
    return replays


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    request.getfixturevalue("library")
    return request.param


@pytest.fixture(scope="module")
def golden(dtype: str) -> Replay:
    """Of one batch of 64 with whole prompts and no prefix hits; each of NUM_ALONE once more, alone."""
    with make_llm(dtype, enable_prefix_caching=False) as llm:
        golden = generate(llm, 0, 64)
        assert [generate(llm, i, 1)[0] for i in range(NUM_ALONE)] == golden[:NUM_ALONE]
        assert llm.llm_engine.facts.inexact_because == ""
    return golden


def test_prefix_hits_and_chunks_change_no_bit(dtype: str, golden: Replay) -> None:
    with make_llm(dtype, max_num_batched_tokens=48) as llm:
        assert generate(llm, 0, 64) == golden
        stats = llm.llm_engine.stats()
        assert generate(llm, 0, 64) == golden  # every prompt but its last part is found
        hits = llm.llm_engine.stats().prefix_cache_hits_total - stats.prefix_cache_hits_total
        assert hits > 64 * 16


@pytest.mark.slow
@pytest.mark.parametrize("hits", [False, True])
@pytest.mark.parametrize("chunk", [1, 16])
def test_no_size_of_chunks_changes_a_bit(dtype: str, golden: Replay, chunk: int, hits: bool) -> None:
    with make_llm(dtype, max_num_batched_tokens=chunk, enable_prefix_caching=hits) as llm:
        assert generate(llm, 0, 64) == golden
        assert generate(llm, 60, 4) == golden[60:]


def test_a_configuration_that_cannot_promise_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="exact=True: not here, since torch multiplies"):
        make_llm("float16", device="cpu")


def test_a_refusal_names_the_switch_that_keeps_the_exact_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(ConfigError, match=f"exact=True: not here, since torch .*; {SWITCH}=0 keeps them off"):
        make_llm("float16", device="cpu")


def test_without_the_promise_the_same_configuration_starts_and_says_why() -> None:
    with LLM(dtype="float16", device="cpu", distributed_executor_backend="uni") as llm:
        assert "torch multiplies" in llm.llm_engine.facts.inexact_because


@pytest.mark.usefixtures("library")
def test_a_restarted_worker_that_computes_in_another_way_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "quire"
    own.mkdir(mode=0o700)
    for library in cache_folder().glob("kernels-*.so"):
        (own / library.name).symlink_to(library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with LLM(max_model_len=128) as llm:
        assert llm.llm_engine.facts.inexact_because == ""
        own.chmod(0o777)  # from a folder like this nothing is loaded
        os.kill(llm.llm_engine.facts.pids["worker"], signal.SIGKILL)
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    assert "computes in another way: replays are semantic: torch" in capfd.readouterr().err
