"""Ranks of one model, of which one fails, hangs or is killed: every other request gets its tokens."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from generated import find_tokens, make_prompts
from poisoned import RAISES, RAISES_IN_OTHERS
from quire import LLM, RequestOutput, SamplingParams
from quire.frontend.client import engines

NUM_REQUESTS = 8
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True)
    for i in range(NUM_REQUESTS)
]
# Before any result of a step, after some, and all at once; the warm-up reaches none of them. Stages are not
# at the same step, so of those only one fails last: each would fail a step of its own.
FAULTS = "worker.execute#1:raise@1,worker.execute#0:raise@4,worker.execute#1:oom@9,"
LAST_FAULTS = {False: "worker.execute:raise@16", True: "worker.execute#1:raise@16"}
# Ranks of a stage, stages, and both: then rank 2 answers.
BOTH = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
CUTS = [
    pytest.param(BOTH, id="both", marks=pytest.mark.slow),
    pytest.param({"tensor_parallel_size": 2}, id="tensor", marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
]


def generate(llm: LLM, firsts: dict[int, int]) -> list[RequestOutput]:
    return llm.generate(make_prompts(firsts, NUM_REQUESTS), PARAMS, use_tqdm=False)


@pytest.fixture(scope="module", params=CUTS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
        patch.setattr(engines, "CORE_MODULE", "poisoned")
        hooks = FAULTS + LAST_FAULTS["pipeline_parallel_size" in request.param]
        fields: dict[str, Any] = {"max_num_seqs": NUM_REQUESTS, "max_worker_restarts": 100, **request.param}
        with LLM(max_model_len=128, fault_hooks=hooks, **fields) as llm:
            yield llm


@pytest.fixture(scope="module")
def golden(llm: LLM) -> list[list[int]]:
    """What the same engine answers after steps have failed in one rank, in the other and in both."""
    disturbed = find_tokens(generate(llm, {}))
    undisturbed = find_tokens(generate(llm, {}))
    assert disturbed == undisturbed
    return undisturbed


@pytest.mark.parametrize("harm", [RAISES, RAISES_IN_OTHERS])
def test_exactly_the_request_that_a_rank_cannot_compute_fails(
    llm: LLM, golden: list[list[int]], harm: int
) -> None:
    outputs = generate(llm, {3: harm})
    assert outputs[3].error_code == "poison_request"
    assert "a poisonous prompt" in (outputs[3].error or "")
    assert find_tokens(outputs[:3] + outputs[4:]) == golden[:3] + golden[4:]
    assert llm.llm_engine.check_integrity() is None


@pytest.mark.slow
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
