"""EngineCoreClients: a frontend's tie to an engine core. The interfaces, and those for threads.

A client knows requests and outputs, not what they mean: text, parents and deltas are the processors' work.
"""

from __future__ import annotations

import importlib
import itertools
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import zmq

from ...ipc.config import EngineConfig
from ...ipc.due import until_ms
from ...ipc.errors import EngineDeadError, EngineStartError
from ...ipc.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineFacts,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.sockets import POLLIN
from .engine_connection import EngineConnection, EngineSocket, PhaseCallback, close_connection
from .engines import DaemonEngine, Engine, EngineProcess
from .wakeup import Wakeup

UTILITY_TIMEOUT_S = 30.0
ATTACH_TIMEOUT_S = 600.0  # to a daemon whose engine is starting
_SEND_RETRY_MS = 2  # a full queue, or that of a connection that was made just now


class EngineCoreClient(ABC):
    """What every client offers. `facts` hold from the moment that it is constructed."""

    facts: EngineFacts
    startup: list[tuple[str, float]]  # (phase, seconds) from the client's construction to ready

    @abstractmethod
    def check_usable(self) -> None:
        """Raise EngineDeadError when the engine has ended, or in a fork of the process that it belongs to."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `add_requests` of one."""
        self.add_requests([request])

    @abstractmethod
    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Hand requests to the engine, many in one message. Raises EngineDeadError if there is none.

        Each is taken on or refused, and answered, on its own.
        """

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
        """Wait for what `read` returns or raises, at most `timeout_s`. [] when the time is over."""
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
    """Speaks with its own core or a daemon's. Another may replace it: client_protocol.py says how."""

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
        self._socket = EngineSocket(engine.address)
        self._finalizer = weakref.finalize(self, close_connection, engine, self._socket)
        self._wakeup = Wakeup()
        self._ready_fds = {self._socket.monitor_fd}  # by the last `wait`
        try:
            self._connection = EngineConnection(engine, self._socket, client_kind, weight)
            self._protocol = self._connection.protocol
            self._wait_until_ready(ready_timeout_s, on_phase)
        except BaseException:
            self._finalizer()
            raise
        self.startup = engine.measure_startup(self.facts)

    def check_usable(self) -> None:
        self._engine.check_owner()
        self._protocol.check()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.check_usable()
        self._protocol.add_requests(requests, time.monotonic())
        try:
            self._send_all()
        except BaseException:
            self._protocol.withdraw_requests([request.request_id for request in requests])
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._protocol.abort_requests(request_ids)
            self._send_all()

    def read(self) -> list[EngineCoreOutput]:
        self.check_usable()
        while (frames := self._receive()) is not None:
            if outputs := self._take(frames):
                return outputs
        return []

    def wait(self, timeout_s: float | None = None) -> None:
        # Not the sockets but their descriptors are asked, which many threads may do.
        timeouts = [] if timeout_s is None else [until_ms(time.monotonic() + timeout_s)]
        if (deadline := self._protocol.next_deadline) is not None:
            timeouts.append(until_ms(deadline))
        if self._protocol.outbox:
            timeouts.append(_SEND_RETRY_MS)
        poller = select.poll()
        exit_fd = -1 if self._protocol.restart_at is not None else self._engine.exit_fd
        for fd in (self._socket.fd, self._socket.monitor_fd, self._wakeup.fd, exit_fd):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        self._ready_fds = {fd for fd, _ in poller.poll(min(timeouts, default=None))}
        if self._wakeup.fd in self._ready_fds:
            self._wakeup.clear()

    @property
    def has_news(self) -> bool:
        protocol = self._protocol
        if protocol.end_reason is not None or not protocol.is_open or protocol.outbox:
            return True
        return bool(self._socket.events & POLLIN)

    def wake(self) -> None:
        self._wakeup.set()

    def start_call(self, method: UtilityMethod) -> int:
        self.check_usable()
        call_id = self._protocol.start_call(method)
        self._send_all()
        return call_id

    def find_answer(self, call_id: int) -> UtilityResult | None:
        return self._protocol.answers.get(call_id)

    def end_call(self, call_id: int) -> None:
        self._protocol.end_call(call_id)

    def close(self) -> None:
        self._protocol.end("the engine was closed")
        self._finalizer()

    def _wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._protocol.is_open:
            if (frames := self._receive()) is not None:
                self._take(frames, on_phase)
                continue
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")
            self.wait(left_s)

    def _send_all(self) -> None:
        """Send what waits to be sent, however long the engine's queue is full. Raises EngineDeadError."""
        while True:
            now = time.monotonic()
            self._connection.send_waiting(now)
            if self._protocol.is_open and not self._protocol.outbox:
                return
            self._protocol.time_passed(now)
            self._look_after_engine(now)
            if not self._protocol.is_open:  # `read` goes on once there is an engine
                return
            self._socket.poll(_SEND_RETRY_MS, zmq.POLLOUT)

    def _receive(self) -> list[bytes] | None:
        """The next message; None if there is none, after a look at the connection and the engine."""
        while True:
            now = time.monotonic()
            if (frames := self._connection.receive(now)) is not None:
                return frames
            ready, self._ready_fds = self._ready_fds, set[int]()
            if self._socket.monitor_fd in ready:
                self._connection.follow_connection(now)
            self._protocol.time_passed(now)
            self._connection.send_waiting(now)
            if self._socket.events & POLLIN:  # a send may take the edge of what has arrived meanwhile
                continue
            has_ended = self._engine.exit_fd in ready
            # What an ended engine said last may still be on its way.
            if has_ended and self._socket.poll(self._engine.last_words_ms, zmq.POLLIN):
                continue
            if has_ended or not self._protocol.is_open:
                self._look_after_engine(now)
            return None

    def _take(self, frames: list[bytes], on_phase: PhaseCallback | None = None) -> list[EngineCoreOutput]:
        now, was_open = time.monotonic(), self._protocol.is_open
        try:
            return self._connection.take(frames, now, on_phase)
        finally:
            if self._protocol.outbox:
                self._connection.send_waiting(now)
            if self._protocol.facts is not None and not was_open:
                self.facts = self._protocol.facts

    def _look_after_engine(self, now: float) -> None:
        """If the engine has ended, start another if this client may and it is time, else raise."""
        self._connection.look_at_engine(now)
        self._protocol.check()
        if self._connection.is_restart_due(now):
            self._connection.start_engine()


class InprocClient(SyncClient):
    """Core, worker and torch in this process, a step a `read`. For debuggers and profilers, which see all."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        super().__init__()
        started_at = time.time()
        # By name, so that a frontend process that does not ask for this mode never loads core or torch.
        engine = importlib.import_module("...core.inproc_engine", __package__)
        self._engine: Any = engine.InprocEngine(config, on_phase)
        self._answers: dict[int, UtilityResult] = {}
        self._call_ids = itertools.count(1)
        self.facts = self._engine.facts
        self.startup = [*self.facts.startup, ("handshake", 0.0)]
        self.startup.insert(0, ("import core", self.facts.started_at - started_at))

    def check_usable(self) -> None:
        self._engine.check_usable()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
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
