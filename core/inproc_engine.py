"""An engine without processes: core and worker in the caller's thread, for debugging. The same EngineCore
and executor interface as engine_process.py; only the sockets are missing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, raise_remote
from ..ipc.messages import EngineCoreOutput, EngineCoreRequest, UtilityCall, UtilityResult
from ..ipc.step import ModelRunnerOutput, StepFailed, WorkerFailed, WorkerProgress, WorkerReady
from .engine_core import EngineCore
from .engine_facts import StartupClock, call_utility, format_startup, make_engine_facts
from .executor import InProcessExecutor
from .stats_collector import AttachedClient, Surroundings

_log = logging.getLogger(__name__)

_CLIENT = b"inproc"


class InprocEngine:
    """Runs steps only while somebody waits for outputs."""

    def __init__(self, config: EngineConfig, on_phase: Callable[[str], None] | None) -> None:
        startup = StartupClock("start core", time.time())
        self._config = config
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._executor = InProcessExecutor(config)
        startup.begin("start worker", time.time())
        self._executor.start()
        for event in self._executor.receive():
            match event:
                case WorkerProgress(phase=phase, at=at):
                    startup.begin(phase, at)
                    if on_phase is not None:
                        on_phase(phase)
                case WorkerReady():
                    self._core = EngineCore(config, event.num_gpu_blocks, clock=time.time)
                    self.facts = make_engine_facts(config, event, {"core": os.getpid()}, startup)
                    for line in format_startup(self.facts):
                        _log.info("%s", line)
                case WorkerFailed():
                    raise_remote(event.kind, event.reason)
                case _:
                    raise AssertionError(f"{event} during start-up")

    def check_usable(self) -> None:
        """Raise EngineDeadError after `close`, and in a fork, as every call does."""
        if os.getpid() != self._owner_pid:
            raise EngineDeadError("this process is a fork of the engine's owner; make an engine of its own")
        if self._is_closed:
            raise EngineDeadError("the engine was closed")

    def add_request(self, request: EngineCoreRequest) -> None:
        """As EngineCore.add_request."""
        self.check_usable()
        self._core.add_request(_CLIENT, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """As EngineCore.abort_requests."""
        self.check_usable()
        self._core.abort_requests(_CLIENT, request_ids)

    def run_step(self) -> list[EngineCoreOutput]:
        """What there is to deliver; else run what can run once, and [] if that gave nothing."""
        self.check_usable()
        if outputs := self._take_outputs():
            return outputs
        self._submit_steps()
        for event in self._executor.receive():
            self._on_event(event)
        return self._take_outputs()

    def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Answer at once."""
        self.check_usable()
        started_at = self.facts.started_at
        connected_s = time.time() - started_at
        client = AttachedClient("inproc", os.getpid(), 1.0, num_unsent=0, connected_s=connected_s)
        return call_utility(self._core, call, Surroundings("inproc", started_at, {_CLIENT: client}))

    def close(self) -> None:
        """Drop the worker. Idempotent."""
        self._is_closed = True
        self._executor.stop(0.0)

    def _take_outputs(self) -> list[EngineCoreOutput]:
        self._core.expire(time.monotonic())
        return self._core.take_outputs().get(_CLIENT, [])

    def _submit_steps(self) -> None:
        if self._core.failures.take_reset():
            self._executor.reset_rows()
        while self._core.num_in_flight < self._config.scheduler.run_ahead:
            step = self._core.schedule()
            if step is None:
                return
            self._executor.submit(step)

    def _on_event(self, event: object) -> None:
        match event:
            case ModelRunnerOutput():
                self._core.update(event)
            case StepFailed():
                self._core.failures.fail_step(event)
            case _:
                pass
