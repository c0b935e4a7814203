"""EngineCoreClients: a frontend's tie to an engine core, private to it. The interfaces and two of the three:

SyncMPClient owns an engine core process and speaks messages.py with it over a socket; InprocClient runs core
and worker in the calling process (debugging; loads torch there). async_engine_core_client.py has the third.
A client knows requests and outputs, not what they mean: text, parents and deltas are the processors' work.
"""

from __future__ import annotations

import importlib
import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import msgspec
import zmq

from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, ProtocolError, QuireError
from ..ipc.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineFacts,
    ProtocolNotice,
    Refusal,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from .engine_link import (
    LAST_WORDS_MS,
    Conversation,
    EngineProcess,
    PhaseCallback,
    close_all,
    connect,
    say_goodbye,
)

UTILITY_TIMEOUT_S = 30.0


class EngineCoreClient(ABC):
    """What every client offers. `facts` hold from the moment that it is constructed."""

    facts: EngineFacts
    startup: list[tuple[str, float]]  # (phase, seconds) from the client's construction to ready

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine. Raises EngineDeadError when there is none any more."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests; each live one still gets its final output."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and its processes within 2 s. Idempotent; safe at interpreter exit."""


class SyncClient(EngineCoreClient):
    """A client for a thread that waits: used by LLMEngine, from one thread at a time."""

    @abstractmethod
    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """Wait until the engine has said something, at most `timeout_s`. [] when the time is over.

        Raises EngineDeadError with the cause when the engine has ended.
        """

    @abstractmethod
    def call_utility(self, method: UtilityMethod) -> UtilityResult:
        """Call the engine and wait for the answer. Outputs that arrive meanwhile are kept."""


def make_sync_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> SyncClient:
    """Start a private engine and wait until it is ready. Raises ModelError, ConfigError or
    EngineStartError."""
    if config.parallel.executor_backend == "uni":
        return InprocClient(config, on_phase)
    return SyncMPClient(config, on_phase)


class SyncMPClient(SyncClient):
    """Owns an engine core process; every call is made from one thread at a time."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        self._engine = EngineProcess(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._finalizer = weakref.finalize(self, close_all, self._context, self._engine)
        self._conversation = Conversation(self._engine)
        self._codec = self._conversation.codec
        self._call_ids = itertools.count(1)
        self._kept: deque[EngineCoreOutput] = deque()
        self._dead_reason: str | None = None
        try:
            self._socket = connect(self._context, self._engine)
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._engine.child.pid_fd, zmq.POLLIN)
            self._wait_until_ready(config.ready_timeout_s, on_phase)
        except BaseException:
            self.close()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(AbortRequests(request_ids))

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        if self._kept:
            outputs = list(self._kept)
            self._kept.clear()
            return outputs
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._receive(deadline)
            match message:
                case None:
                    return []
                case EngineCoreOutputs(outputs=outputs):
                    return outputs
                case _:
                    pass  # the answer to a utility call that timed out

    def call_utility(self, method: UtilityMethod) -> UtilityResult:
        call = UtilityCall(next(self._call_ids), method)
        self._send(call)
        deadline = time.monotonic() + UTILITY_TIMEOUT_S
        while True:
            match self._receive(deadline):
                case None:
                    raise EngineDeadError(f"no answer to {method.name} within {UTILITY_TIMEOUT_S:g} s")
                case UtilityResult(call_id=call_id) as result if call_id == call.call_id:
                    return result
                case EngineCoreOutputs(outputs=outputs):
                    self._kept.extend(outputs)
                case _:
                    pass

    def close(self) -> None:
        self._dead_reason = self._dead_reason or "the engine was closed"
        self._finalizer()

    def _wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None) -> None:
        deadline = time.monotonic() + timeout_s
        # With ZMQ_IMMEDIATE the first send waits until the core listens, so it needs the deadline too.
        self._send_frames(self._conversation.hello(), deadline, EngineStartError)
        while True:
            frames = self._receive_frames(deadline, EngineStartError)
            if frames is None:
                raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")
            if self._conversation.take_welcome(self._socket, frames, on_phase):
                break
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        self.startup = self._conversation.measure_startup(self.facts)

    def _send(self, message: msgspec.Struct) -> None:
        self._engine.check_owner()
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)
        self._send_frames(self._codec.encode(message), None, EngineDeadError)

    def _send_frames(
        self, frames: tuple[bytes, bytes], deadline: float | None, error_class: type[QuireError]
    ) -> None:
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._conversation.raise_if_dead(error_class)
                if deadline is not None and time.monotonic() > deadline:
                    raise error_class("the engine does not take messages") from None
                self._socket.poll(5, zmq.POLLOUT)

    def _receive(self, deadline: float | None) -> Any:
        """The next message; None at the deadline. Raises EngineDeadError."""
        self._engine.check_owner()
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)
        try:
            frames = self._receive_frames(deadline, EngineDeadError)
        except EngineDeadError as error:
            self._dead_reason = str(error)
            raise
        message = None if frames is None else self._codec.decode(frames)
        match message:
            case EngineDead(reason=reason) | Refusal(reason=reason):
                say_goodbye(self._socket)
                self._dead_reason = reason
                raise EngineDeadError(reason)
            case ProtocolNotice(reason=reason):
                raise ProtocolError(reason)
            case _:
                return message

    def _receive_frames(self, deadline: float | None, error_class: type[QuireError]) -> list[bytes] | None:
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                pass
            timeout_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(timeout_ms))
            if not ready:
                return None
            if self._socket not in ready and not self._socket.poll(LAST_WORDS_MS):
                self._conversation.raise_if_dead(error_class)


class InprocClient(SyncClient):
    """Core and worker in this process, one step a call. For debugging: breakpoints and profilers see all."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        started_at = time.time()
        # By name, so that a frontend process that does not ask for this mode never loads core or torch.
        engine = importlib.import_module("..core.inproc_engine", __package__)
        self._engine: Any = engine.InprocEngine(config, on_phase)
        self.facts = self._engine.facts
        self.startup = [*self.facts.startup, ("handshake", 0.0)]
        self.startup.insert(0, ("import core", self.facts.started_at - started_at))

    def add_request(self, request: EngineCoreRequest) -> None:
        self._engine.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._engine.abort_requests(request_ids)

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        del timeout_s
        return self._engine.run_until_outputs()

    def call_utility(self, method: UtilityMethod) -> UtilityResult:
        return self._engine.call_utility(UtilityCall(0, method))

    def close(self) -> None:
        self._engine.close()
