"""Ranks that have a device each, as GPUs are, but on CPUs by gloo: tokens of one; steps fail, ranks die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from generated import find_tokens, make_prompts
from poisoned import RAISES, RAISES_IN_OTHERS
from quire import LLM, RequestOutput, SamplingParams
from quire.frontend.client import engines

NUM_REQUESTS = 6
PARAMS = [
    SamplingParams(
        temperature=float(i % 2), seed=i, max_tokens=8, ignore_eos=True, prompt_logprobs=i % 3 or None
    )
    for i in range(NUM_REQUESTS)
]
FIELDS = {"max_model_len": 64, "max_num_seqs": NUM_REQUESTS, "dtype": "float32", "device": "cpu"}

pytestmark = [pytest.mark.usefixtures("library"), pytest.mark.slow]


def generate(llm: LLM, firsts: dict[int, int]) -> list[RequestOutput]:
    return llm.generate(make_prompts(firsts, NUM_REQUESTS), PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def golden() -> list[list[int]]:
    """What a worker answers that has all of the model."""
    with LLM(distributed_executor_backend="uni", **FIELDS) as llm:
        return find_tokens(generate(llm, {}))


@pytest.fixture(scope="module", params=[2])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
        patch.setattr(engines, "CORE_MODULE", "gloo")
        with LLM(tensor_parallel_size=request.param, max_worker_restarts=100, **FIELDS) as llm:
            yield llm


def test_ranks_give_the_tokens_of_one(llm: LLM, golden: list[list[int]]) -> None:
    assert sorted(llm.llm_engine.facts.pids) == ["core", "worker-0", "worker-1"]
    assert llm.llm_engine.facts.batch_variance_reason == ""
    assert find_tokens(generate(llm, {})) == golden


@pytest.mark.parametrize("harm", [RAISES, RAISES_IN_OTHERS])
def test_exactly_the_request_that_a_rank_cannot_compute_fails(
    llm: LLM, golden: list[list[int]], harm: int
) -> None:
    pids = llm.llm_engine.facts.pids
    outputs = generate(llm, {3: harm})
    assert outputs[3].error_code == "poison_request"
    assert "a poisonous prompt" in (outputs[3].error or "")
    assert find_tokens(outputs[:3] + outputs[4:]) == golden[:3] + golden[4:]
    assert llm.llm_engine.facts.pids == pids  # ranks that wait for one that raised are told, not killed
    assert llm.llm_engine.check_integrity() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["worker-0", "worker-1"])
def test_a_rank_may_be_killed_or_stopped_at_any_time(
    llm: LLM, golden: list[list[int]], number: signal.Signals, role: str
) -> None:
    ranks = psutil.Process(llm.llm_engine.facts.pids["core"]).children()
    pids = {one.cmdline()[-1]: one.pid for one in ranks}
    striker = threading.Timer(0.02, os.kill, (pids[role], number))
    striker.start()
    for _ in range(20):
        assert find_tokens(generate(llm, {})) == golden
    striker.join()
