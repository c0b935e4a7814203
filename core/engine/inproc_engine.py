"""An engine without processes: EngineLoop and the worker in the caller's thread, for debugging. The caller is
its one client, and a turn is run when outputs are asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from ...ipc.errors import EngineDeadError, raise_remote
from ...ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Hello,
    StartupProgress,
    UtilityCall,
    UtilityResult,
)
from ...ipc.spec.config import EngineConfig
from ..clients.client_registry import ClientRegistry
from ..stats.engine_facts import StartupClock
from ..workers.executor import InProcessExecutor
from .engine_loop import EngineLoop

_CLIENT = b"inproc"


class InprocEngine:
    """Runs steps only while somebody waits for outputs."""

    def __init__(self, config: EngineConfig, on_phase: Callable[[str], None] | None) -> None:
        """Load the model and be ready; raises what the worker's start raises."""
        startup = StartupClock("start core", time.time())
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._on_phase = on_phase
        self._outputs: list[EngineCoreOutput] = []
        self._executor = InProcessExecutor(config)
        self._registry = ClientRegistry("inproc", startup.started_at, self._take_message)
        self._loop = EngineLoop(config, self._executor, self._registry, startup)
        self._registry.take(_CLIENT, Hello(PROTOCOL_VERSION, "inproc", self._owner_pid))
        self._loop.start()
        self._registry.deliver()
        if self._loop.end is not None:
            raise_remote(self._loop.end.kind, self._loop.end.reason)
        assert self._registry.facts is not None
        self.facts = self._registry.facts

    def check_usable(self) -> None:
        """Raise EngineDeadError after `close`, and in a fork, as every call does."""
        if os.getpid() != self._owner_pid:
            raise EngineDeadError("this process is a fork of the engine's owner; make an engine of its own")
        if self._is_closed:
            raise EngineDeadError("the engine was closed")

    def add_request(self, request: EngineCoreRequest) -> None:
        """As EngineCore.add_request."""
        self.check_usable()
        self._registry.take(_CLIENT, request)

    def abort_requests(self, request_ids: list[str], names: Sequence[str] = (), tenant: str = "") -> None:
        """As EngineCore.abort_requests."""
        self.check_usable()
        self._registry.take(_CLIENT, AbortRequests(request_ids, list(names), tenant))

    def run_step(self) -> list[EngineCoreOutput]:
        """What there is to deliver; else run what can run once, and [] if that gave nothing."""
        self.check_usable()
        self._registry.deliver()  # what was refused or aborted
        for _ in range(2):  # one turn submits the first step, the next one takes its result
            if not self._outputs:
                self._loop.run_turn()
        outputs, self._outputs = self._outputs, []
        return outputs

    def call_utility(self, call: UtilityCall) -> UtilityResult:
        """Answer at once."""
        self.check_usable()
        return self._registry.answer(call)

    def close(self) -> None:
        """Drop the worker. Idempotent."""
        self._is_closed = True
        self._executor.stop(0.0)

    def _take_message(self, _client: bytes, message: msgspec.Struct) -> bool:
        """What is delivered to the one client; the queue is never full."""
        if isinstance(message, EngineCoreOutputs):
            self._outputs += message.outputs
        elif isinstance(message, StartupProgress) and self._on_phase is not None and message.phase:
            self._on_phase(message.phase)
        return True
