"""A real worker or core dies or is stopped at each stage of its engine's life, beside real clients.

core/test_roster_faults.py has all faults over fake engines; here the processes are those that users run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator

import psutil
import pytest
from daemon_loads import read_engines
from daemons import Daemon, runtime_folders, wait_until
from generated import find_tokens
from quire import LLM, SamplingParams
from quire.frontend.daemon import add_engine, drain_engine, remove_engine, restart_engine, resume_engine
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.daemon.daemon_state import EngineState
from quire.ipc.errors import DaemonError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NAME, TIMEOUT_S = "lifecycle", 120.0
PROMPTS = [f"Once upon a time there were {number} foxes" for number in range(6)]
PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True)
STAGES = ("starting", "ready", "draining", "removed", "restarting")


class Client(threading.Thread):
    """Attaches and generates, a round after the other, until it is finished; each round as undisturbed."""

    def __init__(self, expected: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self._expected, self._is_over = expected, threading.Event()
        self.num_rounds, self.error = 0, list[BaseException]()
        self.start()

    def run(self) -> None:
        try:
            with LLM(attach=NAME) as llm:
                while not self._is_over.is_set():
                    assert find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == self._expected
                    self.num_rounds += 1
        except BaseException as error:
            self.error.append(error)

    def wait_for_rounds(self, count: int) -> None:
        count += self.num_rounds
        assert wait_until(lambda: self.num_rounds >= count or self.error, TIMEOUT_S), "it is not served"
        assert not self.error, self.error

    def finish(self) -> None:
        self.wait_for_rounds(2)
        self._is_over.set()
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        assert not self.error, self.error


def wait_for(is_so: Callable[[dict[int, EngineState]], object]) -> dict[int, EngineState]:
    assert wait_until(lambda: is_so(read_engines(NAME)), TIMEOUT_S), read_engines(NAME)
    return read_engines(NAME)


def find_victim(index: int, role: str) -> int | None:
    """The core of an engine, or its worker once there is one; None where the engine is gone."""
    victims = list[int]()

    def is_there() -> bool:
        engine = read_engines(NAME).get(index)
        if engine is None or engine.pid is None:
            return engine is None
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(engine.pid).children()
            workers = [each.pid for each in children if "quire.worker" in " ".join(each.cmdline())]
            victims[:] = [engine.pid] if role == "core" else workers[:1]
        return bool(victims)

    assert wait_until(is_there, TIMEOUT_S)
    return victims[0] if victims else None


def find_command(stage: str, index: int) -> Callable[[], object] | None:
    """What brings an engine into a stage of its life."""
    commands: dict[str, Callable[[], object]] = {
        "starting": lambda: add_engine(NAME, TIMEOUT_S),
        "draining": lambda: drain_engine(NAME, index, TIMEOUT_S),
        "removed": lambda: remove_engine(NAME, index, TIMEOUT_S),
        "restarting": lambda: restart_engine(NAME, TIMEOUT_S, index),
    }
    return commands.get(stage)


@pytest.fixture(scope="module")
def expected() -> Generator[list[list[int]]]:
    """What the daemon's engines say while nothing happens; two of them run until all tests have ended."""
    args = EngineArgs(
        model="pocket", max_model_len=512, max_core_restarts=90, max_worker_restarts=90, log_level="INFO"
    )
    with runtime_folders(), Daemon(NAME, args.create_engine_config().for_engine(0, 2)):
        with LLM(attach=NAME) as llm:
            tokens = find_tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        yield tokens


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", ["core", "worker"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_stage_of_an_engine_costs_no_client_anything(
    expected: list[list[int]], stage: str, role: str, number: signal.Signals
) -> None:
    before = [Client(expected), Client(expected)]
    for client in before:
        client.wait_for_rounds(1)
    numbers = set(read_engines(NAME))
    index = max(numbers)
    act = find_command(stage, index)

    def command() -> None:
        with contextlib.suppress(DaemonError):  # a removed engine's start is refused
            if act is not None:
                act()

    thread = threading.Thread(target=command, daemon=True)
    thread.start()
    if stage == "starting":
        index = max(wait_for(lambda engines: engines.keys() - numbers))
    if stage == "restarting":
        wait_for(lambda engines: engines[index].state == stage)
    victim = find_victim(index, role)
    meanwhile = [Client(expected), Client(expected)]
    if victim is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
    if stage == "starting" and number == signal.SIGSTOP:
        remove_engine(NAME, index, TIMEOUT_S)  # it would be waited for until ready_timeout_s
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "nobody is told what became of the command"
    for client in [*before, *meanwhile, Client(expected), Client(expected)]:
        client.finish()
    for left in sorted(read_engines(NAME))[2:]:
        remove_engine(NAME, left, TIMEOUT_S)
    if stage == "draining":
        resume_engine(NAME, index, TIMEOUT_S)
    if len(read_engines(NAME)) == 1:
        add_engine(NAME, TIMEOUT_S)
    wait_for(lambda engines: len(engines) == 2 and all(each.state == "ready" for each in engines.values()))
