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
import select
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any, cast

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
    PhaseCallback,
    close_all,
    connect,
    read_connection_events,
    say_goodbye,
)
from .engines import DaemonEngine, Engine, EngineProcess, PlannedRestart
from .wakeup import Wakeup

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
    def check_usable(self) -> None:
        """Raise EngineDeadError when the engine has ended, or in a fork of the process that it belongs to."""

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
    """A client for threads that wait. One thread at a time may use it, except for `wait` and `wake`.

    turns.py lets many threads share one; who has it alone may call `get_outputs` and `call_utility`.
    """

    def __init__(self) -> None:
        self._kept: list[EngineCoreOutput] = []

    @abstractmethod
    def read(self) -> list[EngineCoreOutput]:
        """Outputs that are there, without waiting. [] when there is nothing more; answers may have come then.

        Raises EngineDeadError with the cause when the engine has ended.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until `read` may have something, at most `timeout_s`; it must have returned [] before.

        For one thread, during which others may use the client; they `wake` it when `has_news` afterwards.
        """

    @property
    @abstractmethod
    def has_news(self) -> bool:
        """Whether a thread that is in `wait` since before the last call must look again."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait`, from any thread."""

    @abstractmethod
    def start_call(self, method: UtilityMethod) -> int:
        """Call the engine; `find_answer` has the answer after some `read`. To be ended with `end_call`."""

    @abstractmethod
    def find_answer(self, call_id: int) -> UtilityResult | None:
        """The answer to a call, None while there is none."""

    @abstractmethod
    def end_call(self, call_id: int) -> None:
        """Forget a call and its answer."""

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """Wait until the engine has said something, at most `timeout_s`. [] when the time is over.

        Raises EngineDeadError with the cause when the engine has ended.
        """
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (outputs := self.read()):
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return outputs

    def call_utility(self, method: UtilityMethod, timeout_s: float = UTILITY_TIMEOUT_S) -> UtilityResult:
        """Call the engine and wait for the answer. Outputs that arrive meanwhile stay for `get_outputs`."""
        deadline = time.monotonic() + timeout_s
        call_id = self.start_call(method)
        try:
            while True:
                outputs = self.read()
                self._kept += outputs
                if (answer := self.find_answer(call_id)) is not None:
                    return answer
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise make_call_timeout(method, timeout_s)
                if not outputs:
                    self.wait(left_s)
        finally:
            self.end_call(call_id)


def make_call_timeout(method: UtilityMethod, timeout_s: float) -> EngineDeadError:
    """What a call raises that the engine has not answered in time."""
    return EngineDeadError(f"no answer to {method.name} within {timeout_s:g} s")


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
    """Speaks with an engine core process.

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
        super().__init__()
        self._engine = engine
        self._conversation = Conversation(engine, client_kind, weight)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = connect(self._context, engine)
        self._finalizer = weakref.finalize(self, close_all, self._context, self._socket, engine)
        self._ledger = self._conversation.ledger
        self._codec = self._conversation.codec
        self._call_ids = itertools.count(1)
        self._calls: dict[int, UtilityCall] = {}
        self._answers: dict[int, UtilityResult] = {}
        self._must_say_hello = False
        self._dead_reason: str | None = None
        self._restart: tuple[float, PlannedRestart] | None = None  # when it is due
        self._wakeup = Wakeup()
        self._socket_fd, self._monitor_fd = (
            cast(int, socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)
        )
        self._ready_fds = {self._monitor_fd}  # by the last `wait`
        try:
            self._wait_until_ready(ready_timeout_s, on_phase)
        except BaseException:
            self.close()
            raise

    def check_usable(self) -> None:
        self._engine.check_owner()
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.check_usable()
        self._ledger.add(request, self._conversation.is_open)
        try:
            self._send(request)
        except BaseException:
            self._ledger.remove(request.request_id)
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._ledger.abort(request_ids)
            for message in make_aborts(request_ids):
                self._send(message)

    def read(self) -> list[EngineCoreOutput]:
        self.check_usable()
        try:
            while (frames := self._receive_frames(EngineDeadError)) is not None:
                if outputs := self._take(frames):
                    return outputs
        except EngineDeadError as error:
            self._dead_reason = str(error)
            raise
        return []

    def wait(self, timeout_s: float | None = None) -> None:
        # Not the sockets but their descriptors are asked, which many threads may do. They are readable when
        # something has happened since somebody last asked the socket itself (edge-triggered).
        now = time.monotonic()
        timeouts = [] if timeout_s is None else [until_ms(now + timeout_s)]
        if (check_at := self._conversation.next_check_at) is not None:
            timeouts.append(until_ms(check_at))
        if (restart := self._restart) is not None:
            timeouts.append(until_ms(restart[0]))
        if not self._conversation.is_open:
            timeouts.append(_HELLO_RETRY_MS if self._must_say_hello else _LOST_CHECK_MS)
        poller = select.poll()
        exit_fd = -1 if restart is not None else self._engine.exit_fd
        for fd in (self._socket_fd, self._monitor_fd, self._wakeup.fd, exit_fd):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        self._ready_fds = {fd for fd, _ in poller.poll(min(timeouts, default=None))}
        if self._wakeup.fd in self._ready_fds:
            self._wakeup.clear()

    @property
    def has_news(self) -> bool:
        if self._dead_reason is not None or not self._conversation.is_open or self._must_say_hello:
            return True
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def wake(self) -> None:
        self._wakeup.set()

    def start_call(self, method: UtilityMethod) -> int:
        self.check_usable()
        call = UtilityCall(next(self._call_ids), method)
        self._calls[call.call_id] = call
        self._send(call)
        return call.call_id

    def find_answer(self, call_id: int) -> UtilityResult | None:
        return self._answers.get(call_id)

    def end_call(self, call_id: int) -> None:
        self._calls.pop(call_id, None)
        self._answers.pop(call_id, None)

    def close(self) -> None:
        self._dead_reason = self._dead_reason or "the engine was closed"
        self._finalizer()

    def _wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._conversation.is_open:
            frames = self._receive_frames(EngineStartError)
            if frames is not None:
                self._conversation.take_welcome(self._socket, frames, on_phase)
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")
            self.wait(left_s)
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        self.startup = self._conversation.measure_startup(self.facts)

    # Sending.

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
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        for message in [*self._conversation.resume(), *list(self._calls.values())]:
            self._send(message)

    # Receiving.

    def _take(self, frames: list[bytes]) -> list[EngineCoreOutput]:
        """Outputs of one message. Raises EngineDeadError."""
        if not self._conversation.is_open:
            if self._conversation.take_welcome(self._socket, frames, None):
                self._resume()
            return []
        try:
            message = self._codec.decode(frames)
        except ProtocolError as error:
            self._conversation.distrust(error)
            self._must_say_hello = True
            return []
        match message:
            case EngineCoreOutputs():
                return self._conversation.take_outputs(message)
            case UtilityResult(call_id=call_id):
                if call_id in self._calls:
                    self._answers[call_id] = message
            case EngineDead(reason=reason) | Refusal(reason=reason):
                say_goodbye(self._socket)
                raise EngineDeadError(reason)
            case ProtocolNotice(reason=reason):
                raise ProtocolError(reason)
            case _:
                pass
        return []

    def _receive_frames(self, error_class: type[QuireError]) -> list[bytes] | None:
        """The next message; None if there is none, after a look at the connection and the engine."""
        while True:
            with contextlib.suppress(zmq.Again):
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                self._conversation.note_heard()
                return frames
            ready, self._ready_fds = self._ready_fds, set[int]()
            if self._monitor_fd in ready or self._must_say_hello:
                self._follow_connection()
            self._check_silence()
            # What an ended engine said last may still be on its way.
            if self._engine.exit_fd in ready and self._socket.poll(self._engine.last_words_ms):
                continue
            if self._engine.exit_fd in ready or not self._conversation.is_open:
                self._look_after_engine(error_class)
            return None

    def _check_silence(self) -> None:
        if self._conversation.check_silence():
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(PING, zmq.NOBLOCK)

    def _look_after_engine(self, error_class: type[QuireError]) -> None:
        """If the engine has ended, start another if this client may, else raise; its connection then begins
        as any other. Raises too when there has been no conversation for too long.
        """
        if self._restart is None:
            end = self._engine.describe_end()
            if end is None:
                self._conversation.raise_if_away_too_long(error_class)
                return
            restart = None if self._conversation.facts is None else self._engine.plan_restart()
            if restart is None:
                raise error_class(self._engine.describe_end() or end)
            self._restart = time.monotonic() + restart.after_s, restart
        due_at, restart = self._restart
        if time.monotonic() >= due_at:
            self._restart = None
            restart.start()


class InprocClient(SyncClient):
    """Core and worker in this process, a step a `read`. For debugging: breakpoints and profilers see all."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        super().__init__()
        started_at = time.time()
        # By name, so that a frontend process that does not ask for this mode never loads core or torch.
        engine = importlib.import_module("..core.inproc_engine", __package__)
        self._engine: Any = engine.InprocEngine(config, on_phase)
        self._answers: dict[int, UtilityResult] = {}
        self._call_ids = itertools.count(1)
        self.facts = self._engine.facts
        self.startup = [*self.facts.startup, ("handshake", 0.0)]
        self.startup.insert(0, ("import core", self.facts.started_at - started_at))

    def check_usable(self) -> None:
        self._engine.check_usable()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._engine.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._engine.abort_requests(request_ids)

    def read(self) -> list[EngineCoreOutput]:
        return self._engine.run_step()

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing comes by itself."""

    @property
    def has_news(self) -> bool:
        return False

    def wake(self) -> None:
        """Nobody waits."""

    def start_call(self, method: UtilityMethod) -> int:
        call_id = next(self._call_ids)
        self._answers[call_id] = self._engine.call_utility(UtilityCall(call_id, method))
        return call_id

    def find_answer(self, call_id: int) -> UtilityResult | None:
        return self._answers.get(call_id)

    def end_call(self, call_id: int) -> None:
        self._answers.pop(call_id, None)

    def close(self) -> None:
        self._engine.close()
