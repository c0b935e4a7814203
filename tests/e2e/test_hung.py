"""Worker processes that hang, stop or crash, or are sent nonsense: no token is lost.

What they compute is fake (fake_process.py); that real ones change no token either is test_exact.py's.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from daemons import wait_for_end
from generated import find_tokens
from quire import LLM, SamplingParams
from quire.ipc.errors import EngineStartError

pytestmark = pytest.mark.usefixtures("fake_worker")

PROMPTS = [f"Story number {number}" for number in range(20)]
PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=50, ignore_eos=True) for i in range(20)]


def generate(llm: LLM) -> list[list[int]]:
    return find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def test_hung_and_garbled_steps_cost_no_token_and_a_row_without_numbers_ends_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    hooks = "worker.execute:slow@10,worker.logits:nan@10,worker.execute:hang@30,core.step_frame:corrupt@80"
    with LLM(max_model_len=512, step_timeout_s=0.5, fault_hooks=hooks) as llm:
        worker = llm.llm_engine.facts.pids["worker"]
        disturbed = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        undisturbed = generate(llm)
        log = capfd.readouterr().err
    ends = [output.outputs[0].finish_reason for output in disturbed]
    assert ends.count("error") == 1
    assert ends.count("length") == 19
    for output, tokens in zip(disturbed, undisturbed, strict=True):
        own = list(output.outputs[0].token_ids)
        assert own == tokens[: len(own)]
    assert f"(pid {worker}) was killed by SIGKILL: step" in log
    assert "took longer than step_timeout_s=0.5" in log
    assert "_launch_step" in log, "the hung worker's stacks were not written"
    assert log.count("starting another") == 2


def test_a_crash_with_twenty_requests_costs_no_token() -> None:
    with LLM(max_model_len=512, fault_hooks="worker.execute:segfault@30") as llm:
        disturbed = generate(llm)
        assert disturbed == generate(llm)


def test_a_stopped_worker_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(max_model_len=512) as llm:
        expected = generate(llm)
        pid = llm.llm_engine.facts.pids["worker"]
        os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            took_s = pool.submit(wait_for_end, pid)
            assert generate(llm) == expected
            took_s.result()
        assert "SIGKILL: it is stopped" in capfd.readouterr().err


@pytest.mark.parametrize("phase", [1, 3, 5])
def test_a_worker_that_ends_in_a_phase_of_its_start_is_an_error(phase: int) -> None:
    with pytest.raises(EngineStartError, match=r"worker \(pid \d+\) exited with code 1"):
        LLM(max_model_len=512, fault_hooks=f"worker.start:exit@{phase}")
