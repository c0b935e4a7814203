"""An engine with a warm spare: it takes the place of a lost worker, and of a lost core's worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from daemons import wait_for_end, wait_until
from generated import find_tokens
from quire import LLM, SamplingParams
from quire.frontend.client.async_engine_core_client import AsyncMPClient
from quire.frontend.client.engines import EngineProcess

pytestmark = pytest.mark.usefixtures("fake_worker")

PROMPTS = [f"Story number {number}" for number in range(16)]
PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=True) for i in range(16)]


def generate(llm: LLM) -> list[list[int]]:
    return find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def find_engine(llm: LLM) -> EngineProcess:
    client = llm.llm_engine._client
    assert isinstance(client, AsyncMPClient)
    assert isinstance(client._links.first.engine, EngineProcess)
    return client._links.first.engine


def find_spare(core_pid: int, others: tuple[int, ...]) -> int | None:
    """The pid of a core's child that began as a spare and is none of `others`."""
    for pid in Path(f"/proc/{core_pid}/task/{core_pid}/children").read_text().split():
        if int(pid) not in others and b"spare-worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return None


def wait_for_spare(engine: EngineProcess, *others: int) -> int:
    """The pid of a spare that waits to be adopted and is none of these."""
    socket, core_pid = engine.run_dir.path / "spare.sock", engine.process.pid
    assert wait_until(lambda: socket.exists() and find_spare(core_pid, others) is not None, 90.0)
    pid = find_spare(core_pid, others)
    assert pid is not None
    return pid


def test_a_spare_replaces_a_lost_worker_and_another_one_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(max_model_len=512, warm_spare=True) as llm:
        engine = find_engine(llm)
        expected = generate(llm)
        first = wait_for_spare(engine)
        os.kill(llm.llm_engine.facts.pids["worker"], signal.SIGKILL)
        assert generate(llm) == expected
        second = wait_for_spare(engine, first)
        core = engine.process.pid
    for pid in (first, second, core):
        wait_for_end(pid)
    log = capfd.readouterr().err
    assert "another worker is ready in" in log
    assert log.count("starting another") == 1


def test_a_spare_is_the_worker_of_the_core_that_replaces_a_lost_one() -> None:
    with LLM(max_model_len=512, warm_spare=True) as llm:
        engine = find_engine(llm)
        expected = generate(llm)
        spare, core = wait_for_spare(engine), engine.process.pid
        os.kill(core, signal.SIGKILL)
        assert generate(llm) == expected
        assert llm.llm_engine.facts.pids["worker"] == spare
        last = wait_for_spare(engine)
    for pid in (core, spare, last):
        wait_for_end(pid)
