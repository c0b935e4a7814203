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
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ...ipc.errors import EngineDeadError, EngineStartError
from ...ipc.processes.due import until_ms
from ...ipc.protocol.client_protocol import LOST_CALL
from ...ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineFacts,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.protocol.sockets import POLLIN
from ...ipc.spec.config import EngineConfig
from .engine_connection import PhaseCallback
from .engine_links import GATHER_S, EngineLink, connect_links
from .engines import Engine, start_engines
from .remote_daemon import Attachment, find_daemon_engines
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
    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        """As UtilityCalls'."""

    @property
    def engines(self) -> dict[int, EngineFacts]:
        """What each engine that is there says of itself, by its number; one alone is 0."""
        return {0: self.facts}

    @abstractmethod
    def start_call(self, method: UtilityMethod, engine: int | None = None) -> int:
        """Call an engine, None: any; `find_answer` has the answer after some `read`. To be ended with
        `end_call`. It is an error if the engine is lost before it answers and there are others; "any" is then
        another.
        """

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

    def call_utility(
        self, method: UtilityMethod, timeout_s: float = UTILITY_TIMEOUT_S, engine: int | None = None
    ) -> UtilityResult:
        """Call an engine and wait for the answer. Outputs that arrive meanwhile stay for `get_outputs`."""
        deadline = time.monotonic() + timeout_s
        call_id = self.start_call(method, engine)
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
    """Start private engines and wait until they are ready. Raises ModelError, ConfigError or
    EngineStartError."""
    if config.parallel.executor_backend == "uni":
        return InprocClient(config, on_phase)
    return SyncMPClient(start_engines(config), config.ready_timeout_s, on_phase)


def attach_sync_client(
    daemon: Attachment,
    client_kind: str,
    weight: float = 1.0,
    timeout_s: float = ATTACH_TIMEOUT_S,
    on_phase: PhaseCallback | None = None,
) -> SyncClient:
    """Attach to a running daemon. Raises DaemonError when there is none of this name, EngineStartError when
    no engine of it answers in time."""
    engines = find_daemon_engines(daemon)
    return SyncMPClient(engines, timeout_s, on_phase, client_kind=client_kind, weight=weight)


class _Call:
    """A utility call of one engine."""

    def __init__(self, link: EngineLink, method: UtilityMethod, *, is_for_any: bool) -> None:
        self.method = method
        self.is_for_any = is_for_any  # for this engine only because it was there
        self._protocol = link.protocol
        self._id = self._protocol.start_call(method)

    def find_answer(self) -> UtilityResult | None:
        """An error if the engine has ended for good."""
        answer = self._protocol.answers.get(self._id)
        if answer is None and self._protocol.end_reason is not None:
            return UtilityResult(
                self._id, LOST_CALL if self._protocol.has_others else self._protocol.end_reason
            )
        return answer

    def end(self) -> None:
        self._protocol.end_call(self._id)


class SyncMPClient(SyncClient):
    """With engines of its own or a daemon's. A lost one may be replaced: client_protocol.py says how."""

    def __init__(
        self,
        engines: Sequence[Engine],
        ready_timeout_s: float,
        on_phase: PhaseCallback | None = None,
        *,
        client_kind: str = "private",
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        self._links = connect_links(engines, client_kind, weight)
        self._links.on_added = self._note_added
        self._finalizer = weakref.finalize(self, self._links.close)
        self._calls: dict[int, _Call] = {}
        self._call_ids = itertools.count(1)
        self._wakeup = Wakeup()
        self._ready_fds = {link.socket.monitor_fd for link in self._links}  # by the last `wait`
        try:
            self._wait_until_ready(ready_timeout_s, on_phase)
        except BaseException:
            self._finalizer()
            raise
        self.startup = self._links.first.engine.measure_startup(self.facts)

    @property
    def engines(self) -> dict[int, EngineFacts]:
        return self._links.facts

    def check_usable(self) -> None:
        self._links.check()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.check_usable()
        self._links.target.add_requests(requests, time.monotonic())
        try:
            self._send_all()
        except BaseException:
            self._links.target.withdraw_requests([request.request_id for request in requests])
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._links.target.abort_requests(request_ids)
            self._send_all()

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        self.check_usable()
        self._links.target.abort_named(names, tenant)
        self._send_all()

    def read(self) -> list[EngineCoreOutput]:
        self.check_usable()
        for link in self._links.take_turns():
            while not link.is_gone and (frames := self._receive(link)) is not None:
                if outputs := self._take(link, frames):
                    return outputs
        return []

    def wait(self, timeout_s: float | None = None) -> None:
        # Not the sockets but their descriptors are asked, which many threads may do.
        timeouts = [] if timeout_s is None else [until_ms(time.monotonic() + timeout_s)]
        poller = select.poll()
        poller.register(self._wakeup.fd, select.POLLIN)
        if (search_at := self._links.next_search_at) is not None:
            timeouts.append(until_ms(search_at))
        for link in self._links:
            if (deadline := link.protocol.next_deadline) is not None:
                timeouts.append(until_ms(deadline))
            if link.protocol.outbox:
                timeouts.append(_SEND_RETRY_MS)
            for fd in link.list_fds():
                poller.register(fd, select.POLLIN)
        self._ready_fds = {fd for fd, _ in poller.poll(min(timeouts, default=None))}
        if self._wakeup.fd in self._ready_fds:
            self._wakeup.clear()

    @property
    def has_news(self) -> bool:
        return any(link.has_news for link in self._links)

    def wake(self) -> None:
        self._wakeup.set()

    def start_call(self, method: UtilityMethod, engine: int | None = None) -> int:
        self.check_usable()
        call_id = next(self._call_ids)
        self._calls[call_id] = _Call(self._links.find(engine), method, is_for_any=engine is None)
        self._send_all()
        return call_id

    def find_answer(self, call_id: int) -> UtilityResult | None:
        call = self._calls[call_id]
        answer = call.find_answer()
        if answer is None or answer.error != LOST_CALL or not call.is_for_any or self._links.have_ended:
            return answer
        call.end()
        self._calls[call_id] = _Call(self._links.find(None), call.method, is_for_any=True)
        self._send_all()
        return None

    def end_call(self, call_id: int) -> None:
        if (call := self._calls.pop(call_id, None)) is not None:
            call.end()

    def close(self) -> None:
        self._links.end("the engine was closed")
        self._finalizer()

    def _wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None) -> None:
        if not self._wait_for(lambda: self._links.are_ready, timeout_s, on_phase):
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")
        self._wait_for(lambda: self._links.are_gathered, GATHER_S)
        self._links.form_group()

    def _wait_for(
        self, is_done: Callable[[], bool], timeout_s: float, on_phase: PhaseCallback | None = None
    ) -> bool:
        """Take what engines say until `is_done()`; False if it is not after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            received = [(link, self._receive(link)) for link in self._links.take_turns()]
            for link, frames in received:
                if frames is not None and not link.is_gone:
                    self._take(link, frames, on_phase)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return is_done()
            if all(frames is None for _, frames in received):
                self.wait(left_s)
        return True

    def _send_all(self) -> None:
        """Send what waits to be sent, however long an engine's queue is full. Raises EngineDeadError."""
        for link in self._links.take_turns():
            self._send_all_to(link)

    def _send_all_to(self, link: EngineLink) -> None:
        while True:
            now = time.monotonic()
            link.connection.send_waiting(now)
            if link.protocol.is_open and not link.protocol.outbox:
                return
            link.protocol.time_passed(now)
            self._look_after_engine(link, now)
            self._settle(now)
            if not link.protocol.is_open:  # `read` goes on once there is an engine
                return
            link.socket.poll(_SEND_RETRY_MS, zmq.POLLOUT)

    def _receive(self, link: EngineLink) -> list[bytes] | None:
        """The next message; None if there is none, after a look at the connection and the engine."""
        protocol, socket = link.protocol, link.socket
        while True:
            now = time.monotonic()
            if (frames := link.connection.receive(now)) is not None:
                return frames
            is_connection_news = socket.monitor_fd in self._ready_fds
            has_ended = link.engine.exit_fd in self._ready_fds
            self._ready_fds.difference_update((socket.monitor_fd, link.engine.exit_fd))
            if is_connection_news:
                link.connection.follow_connection(now)
            protocol.time_passed(now)
            link.connection.send_waiting(now)
            if socket.events & POLLIN:  # a send may take the edge of what has arrived meanwhile
                continue
            # What an ended engine said last may still be on its way.
            if has_ended and socket.poll(link.engine.last_words_ms, zmq.POLLIN):
                continue
            if has_ended or not protocol.is_open:
                self._look_after_engine(link, now)
                self._links.search(now)
            self._settle(now)
            return None

    def _take(
        self, link: EngineLink, frames: list[bytes], on_phase: PhaseCallback | None = None
    ) -> list[EngineCoreOutput]:
        now = time.monotonic()
        try:
            return self._links.take(link, frames, now, on_phase)
        finally:
            if link.protocol.outbox and not link.is_gone:
                link.connection.send_waiting(now)
            self._settle(now)
            self._note_facts()

    def _look_after_engine(self, link: EngineLink, now: float) -> None:
        """If the engine has ended, start another if this client may and it is time, else raise."""
        link.connection.look_at_engine(now)
        if self._links.lose_if_ended(link, now):
            self._note_facts()
            return
        link.protocol.check()
        if link.connection.is_restart_due(now):
            link.connection.start_engine()

    def _settle(self, now: float) -> None:
        """Move what a lost engine has to others, and send it to them as far as they take it."""
        if self._links.group is not None and self._links.group.settle(now):
            for link in self._links:
                link.connection.send_waiting(now)

    def _note_facts(self) -> None:
        if self._links.shown_facts is not None:
            self.facts = self._links.shown_facts

    def _note_added(self, link: EngineLink) -> None:
        self._ready_fds.add(link.socket.monitor_fd)


class InprocClient(SyncClient):
    """Core, worker and torch in this process, a step a `read`. For debuggers and profilers, which see all."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        super().__init__()
        started_at = time.time()
        # By name, so that a frontend process that does not ask for this mode never loads core or torch.
        engine = importlib.import_module("...core.engine.inproc_engine", __package__)
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

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        self._engine.abort_requests([], names, tenant)

    def read(self) -> list[EngineCoreOutput]:
        return self._engine.run_step()

    def wait(self, timeout_s: float | None = None) -> None:
        """Nothing comes by itself."""

    @property
    def has_news(self) -> bool:
        return False

    def wake(self) -> None:
        """Nobody waits."""

    def start_call(self, method: UtilityMethod, engine: int | None = None) -> int:
        assert engine in (None, 0), "there is one engine"
        call_id = next(self._call_ids)
        self._answers[call_id] = self._engine.call_utility(UtilityCall(call_id, method))
        return call_id

    def find_answer(self, call_id: int) -> UtilityResult | None:
        return self._answers.get(call_id)

    def end_call(self, call_id: int) -> None:
        self._answers.pop(call_id, None)

    def close(self) -> None:
        self._engine.close()
