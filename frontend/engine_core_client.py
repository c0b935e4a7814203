"""EngineCoreClients: a frontend's tie to an engine core. The interfaces and two of the three:

SyncMPClient speaks messages.py over a socket, with an engine core process that it owns or with a daemon's;
InprocClient runs core and worker in the calling process (debugging; loads torch there).
async_engine_core_client.py has the third.
A client knows requests and outputs, not what they mean: text, parents and deltas are the processors' work.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import msgspec
import zmq

from ..ipc.codec import PING
from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, ProtocolError, QuireError
from ..ipc.messages import (
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
    make_aborts,
)
from ..ipc.sockets import until_ms
from .engine_link import (
    Conversation,
    DaemonEngine,
    Engine,
    EngineProcess,
    PhaseCallback,
    close_all,
    connect,
    read_connection_events,
    say_goodbye,
)

UTILITY_TIMEOUT_S = 30.0
ATTACH_TIMEOUT_S = 600.0  # to a daemon whose engine is starting
_SEND_RETRY_MS = 5
_HELLO_RETRY_MS = 2  # the connection stands and its queue is about to
_LOST_CHECK_MS = 500


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
        """Leave the engine; a private one ends with its processes within 2 s. Idempotent; safe at exit."""


class SyncClient(EngineCoreClient):
    """A client for a thread that waits: used by LLMEngine, from one thread at a time."""

    @abstractmethod
    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """Wait until the engine has said something, at most `timeout_s`. [] when the time is over.

        Raises EngineDeadError with the cause when the engine has ended.
        """

    @abstractmethod
    def call_utility(self, method: UtilityMethod, timeout_s: float = UTILITY_TIMEOUT_S) -> UtilityResult:
        """Call the engine and wait for the answer. Outputs that arrive meanwhile are kept."""


def make_sync_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> SyncClient:
    """Start a private engine and wait until it is ready. Raises ModelError, ConfigError or
    EngineStartError."""
    if config.parallel.executor_backend == "uni":
        return InprocClient(config, on_phase)
    return SyncMPClient(EngineProcess(config), config.ready_timeout_s, on_phase)


def attach_sync_client(
    name: str,
    client_kind: str,
    weight: float = 1.0,
    timeout_s: float = ATTACH_TIMEOUT_S,
    on_phase: PhaseCallback | None = None,
) -> SyncClient:
    """Come to a running daemon. Raises DaemonError when there is none of this name, EngineStartError when
    its engine does not answer in time."""
    return SyncMPClient(DaemonEngine(name), timeout_s, on_phase, client_kind=client_kind, weight=weight)


class SyncMPClient(SyncClient):
    """Speaks with an engine core process; every call is made from one thread at a time.

    When the connection ends and the engine (or another one in its place) can be reached again, every
    unfinished request is added again with the tokens that it has, and goes on.
    """

    def __init__(
        self,
        engine: Engine,
        ready_timeout_s: float,
        on_phase: PhaseCallback | None = None,
        *,
        client_kind: str = "private",
        weight: float = 1.0,
    ) -> None:
        self._engine = engine
        self._conversation = Conversation(engine, client_kind, weight)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = connect(self._context, engine)
        self._finalizer = weakref.finalize(self, close_all, self._context, self._socket, engine)
        self._ledger = self._conversation.ledger
        self._codec = self._conversation.codec
        self._call_ids = itertools.count(1)
        self._pending_call: UtilityCall | None = None
        self._kept: deque[EngineCoreOutput] = deque()
        self._must_say_hello = False
        self._dead_reason: str | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(engine.exit_fd, zmq.POLLIN)
        try:
            self._wait_until_ready(ready_timeout_s, on_phase)
        except BaseException:
            self.close()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check_usable()
        self._ledger.add(request, self._conversation.is_open)
        try:
            self._send(request)
        except BaseException:
            self._ledger.remove(request.request_id)
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._check_usable()
            self._ledger.abort(request_ids)
            for message in make_aborts(request_ids):
                self._send(message)

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        if self._kept:
            outputs = list(self._kept)
            self._kept.clear()
            return outputs
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            match self._receive(deadline):
                case None:
                    return []
                case EngineCoreOutputs() as message:
                    if outputs := self._conversation.take_outputs(message):
                        return outputs
                case _:
                    pass  # the answer to a utility call that timed out

    def call_utility(self, method: UtilityMethod, timeout_s: float = UTILITY_TIMEOUT_S) -> UtilityResult:
        self._check_usable()
        call = self._pending_call = UtilityCall(next(self._call_ids), method)
        deadline = time.monotonic() + timeout_s
        try:
            self._send(call)
            while True:
                match self._receive(deadline):
                    case None:
                        raise EngineDeadError(f"no answer to {method.name} within {timeout_s:g} s")
                    case UtilityResult(call_id=call_id) as result if call_id == call.call_id:
                        return result
                    case EngineCoreOutputs() as message:
                        self._kept.extend(self._conversation.take_outputs(message))
                    case _:
                        pass
        finally:
            self._pending_call = None

    def close(self) -> None:
        self._dead_reason = self._dead_reason or "the engine was closed"
        self._finalizer()

    def _wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._conversation.is_open:
            frames = self._receive_frames(deadline, EngineStartError)
            if frames is None:
                raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")
            self._conversation.take_welcome(self._socket, frames, on_phase)
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        self.startup = self._conversation.measure_startup(self.facts)

    # Sending.

    def _check_usable(self) -> None:
        self._engine.check_owner()
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)

    def _send(self, message: msgspec.Struct) -> None:
        """Send now; while there is no conversation nothing is sent, and `_resume` makes up for it."""
        frames = self._codec.encode(message)
        while True:
            self._follow_connection()
            if not self._conversation.is_open:
                self._look_after_engine(EngineDeadError)
                return
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._check_silence()
                self._look_after_engine(EngineDeadError)
                self._socket.poll(_SEND_RETRY_MS, zmq.POLLOUT)

    def _follow_connection(self) -> None:
        """Learn whether the connection has ended or stands again; a new one begins with Hello."""
        for is_up in read_connection_events(self._monitor):
            self._must_say_hello = is_up
            if not is_up:
                self._conversation.lose()
        if self._must_say_hello:
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(self._conversation.hello(), zmq.NOBLOCK)
                self._must_say_hello = False

    def _resume(self) -> None:
        for message in self._conversation.resume():
            self._send(message)
        if self._pending_call is not None:
            self._send(self._pending_call)

    # Receiving.

    def _receive(self, deadline: float | None) -> Any:
        """The next message of an open conversation; None at the deadline. Raises EngineDeadError."""
        self._check_usable()
        try:
            message = self._receive_message(deadline)
        except EngineDeadError as error:
            self._dead_reason = str(error)
            raise
        match message:
            case EngineDead(reason=reason) | Refusal(reason=reason):
                say_goodbye(self._socket)
                self._dead_reason = reason
                raise EngineDeadError(reason)
            case ProtocolNotice(reason=reason):
                raise ProtocolError(reason)
            case _:
                return message

    def _receive_message(self, deadline: float | None) -> Any:
        while True:
            frames = self._receive_frames(deadline, EngineDeadError)
            if frames is None:
                return None
            if self._conversation.is_open:
                try:
                    return self._codec.decode(frames)
                except ProtocolError as error:
                    self._conversation.distrust(error)
                    self._must_say_hello = True
                    continue
            if self._conversation.take_welcome(self._socket, frames, None):
                assert self._conversation.facts is not None
                self.facts = self._conversation.facts
                self._resume()

    def _receive_frames(self, deadline: float | None, error_class: type[QuireError]) -> list[bytes] | None:
        while True:
            with contextlib.suppress(zmq.Again):
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._conversation.note_heard()
                return frames
            ready = self._poll(deadline)
            if ready is None:
                return None
            if self._monitor in ready or self._must_say_hello:
                self._follow_connection()
            self._check_silence()
            # What an ended engine said last may still be on its way.
            if self._engine.exit_fd in ready and self._socket.poll(self._engine.last_words_ms):
                continue
            if self._engine.exit_fd in ready or not self._conversation.is_open:
                self._look_after_engine(error_class)

    def _check_silence(self) -> None:
        if self._conversation.check_silence():
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(PING, zmq.NOBLOCK)

    def _look_after_engine(self, error_class: type[QuireError]) -> None:
        """If the engine has ended, start another if this client may, else raise; its connection then begins
        as any other. Raises too when there has been no conversation for too long.
        """
        end = self._engine.describe_end()
        if end is None:
            self._conversation.raise_if_away_too_long(error_class)
            return
        restart = None if self._conversation.facts is None else self._engine.plan_restart()
        if restart is None:
            raise error_class(self._engine.describe_end() or end)
        time.sleep(restart.after_s)
        self._poller.unregister(self._engine.exit_fd)
        restart.start()
        self._poller.register(self._engine.exit_fd, zmq.POLLIN)

    def _poll(self, deadline: float | None) -> dict[Any, int] | None:
        """What is ready, perhaps nothing; None when the deadline has passed."""
        now = time.monotonic()
        left_ms = None if deadline is None else max(0, int((deadline - now) * 1000))
        timeouts = [] if left_ms is None else [left_ms]
        if (check_at := self._conversation.next_check_at) is not None:
            timeouts.append(until_ms(check_at))
        if not self._conversation.is_open:
            timeouts.append(_HELLO_RETRY_MS if self._must_say_hello else _LOST_CHECK_MS)
        ready = dict(self._poller.poll(min(timeouts, default=None)))
        return None if not ready and left_ms == 0 else ready


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

    def call_utility(self, method: UtilityMethod, timeout_s: float = UTILITY_TIMEOUT_S) -> UtilityResult:
        del timeout_s
        return self._engine.call_utility(UtilityCall(0, method))

    def close(self) -> None:
        self._engine.close()
