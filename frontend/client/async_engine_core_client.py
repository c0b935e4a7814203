"""AsyncMPClient: the EngineCoreClient of an event loop, with an engine of its own or a daemon's.

A ZeroMQ socket's descriptor is edge-triggered, and every call on the socket, also a send, may swallow the
edge. So one rule holds here: nothing but `_pump` touches the socket, and it goes on until both ways are dry.
The monitor of its connection is another socket, drained by each call of EngineConnection.follow_connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Sequence

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError, EngineStartError
from ...ipc.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FrontendCounts,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.sockets import POLLIN, POLLOUT
from .engine_connection import EngineConnection, EngineSocket, PhaseCallback, close_connection
from .engine_core_client import ATTACH_TIMEOUT_S, UTILITY_TIMEOUT_S, EngineCoreClient, make_call_timeout
from .engines import DaemonEngine, Engine, EngineProcess

_MAX_INBOX = 64  # messages read ahead of the consumer; more stay in the socket, whose limit the engine sees


async def make_async_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> AsyncMPClient:
    """Start a private engine and wait until it is ready. Raises ModelError, ConfigError, EngineStartError.

    The engine core is a process of its own in every case.
    """
    client = AsyncMPClient(EngineProcess(config))
    await client.wait_until_ready(config.ready_timeout_s, on_phase)
    return client


async def attach_async_client(name: str, client_kind: str, weight: float = 1.0) -> AsyncMPClient:
    """Attach to a running daemon. Raises DaemonError when there is none of this name."""
    client = AsyncMPClient(DaemonEngine(name), client_kind=client_kind, weight=weight)
    await client.wait_until_ready(ATTACH_TIMEOUT_S)
    return client


class AsyncMPClient(EngineCoreClient):
    """Used from one event loop. Its engine may be replaced by another: client_protocol.py says how."""

    def __init__(self, engine: Engine, *, client_kind: str = "private", weight: float = 1.0) -> None:
        self._engine = engine
        self._socket = EngineSocket(engine.address)
        self._finalizer = weakref.finalize(self, close_connection, engine, self._socket)
        self._connection = EngineConnection(engine, self._socket, client_kind, weight)
        self._protocol = self._connection.protocol
        self._inbox: deque[list[bytes]] = deque()
        self._unsent: list[EngineCoreRequest] = []  # of this turn of the loop
        self._is_behind = False  # more has come than the inbox takes
        self._has_news = asyncio.Event()  # the inbox has grown, or the engine has ended
        self._calls: dict[int, asyncio.Future[UtilityResult]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fd, self._pump)
        self._loop.add_reader(self._socket.monitor_fd, self._follow_connection)
        self._loop.add_reader(engine.exit_fd, self._on_engine_exit)
        self._follow_connection()

    @property
    def is_connected(self) -> bool:
        """False while the engine is being restarted; requests wait and go on afterwards."""
        return self._protocol.is_open

    async def wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None = None) -> None:
        """Start-up's other half. Raises like `make_async_client`, and then has ended the engine."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._protocol.is_open:
                    self._take(await self._receive(), on_phase)
        except TimeoutError:
            self.close()
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise
        self.startup = self._engine.measure_startup(self.facts)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.check_usable()
        self._protocol.add_requests(requests, time.monotonic())
        self._pump()

    def add_requests_soon(self, requests: Sequence[EngineCoreRequest]) -> None:
        """As `add_requests`, in one message with whatever else is added in this turn of the loop.

        A message costs this process and the core about as much as a short text does.
        """
        self.check_usable()
        if not self._unsent:
            self._loop.call_soon(self._send_unsent)
        self._unsent += requests

    def _send_unsent(self) -> None:
        if self._unsent and self._protocol.end_reason is None:
            requests, self._unsent = self._unsent, []
            self._protocol.add_requests(requests, time.monotonic())
            self._pump()

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._send_unsent()
            self._protocol.abort_requests(request_ids)
            self._pump()

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        """As AsyncLLM's."""
        self.check_usable()
        self._send_unsent()
        self._protocol.abort_named(names, tenant)
        self._pump()

    def add_counts(self, counts: FrontendCounts) -> None:
        """As AsyncLLM's."""
        self.check_usable()
        self._protocol.add_counts(counts)
        self._pump()

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for outputs; called by one task only, which also resolves utility calls.

        Raises EngineDeadError with the cause when the engine has ended; so does every call that still waits.
        """
        try:
            while not (outputs := self._take(await self._receive())):
                for call_id, result in self._protocol.answers.items():
                    if not self._calls[call_id].done():
                        self._calls[call_id].set_result(result)
            return outputs
        except Exception as error:
            self._end(str(error))
            raise

    async def call_utility(self, method: UtilityMethod) -> UtilityResult:
        """Call the engine; the answer comes through the task that runs `get_outputs`."""
        self.check_usable()
        call_id = self._protocol.start_call(method)
        answer = self._calls[call_id] = self._loop.create_future()
        try:
            self._pump()
            async with asyncio.timeout(UTILITY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise make_call_timeout(method, UTILITY_TIMEOUT_S) from None
        finally:
            self._protocol.end_call(call_id)
            del self._calls[call_id]

    def close(self) -> None:
        if self._finalizer.alive:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                for fd in (self._socket.fd, self._socket.monitor_fd, self._engine.exit_fd):
                    self._loop.remove_reader(fd)
                if self._timer is not None:
                    self._timer.cancel()
        with contextlib.suppress(RuntimeError):  # as above: then nobody waits any more
            self._end("the engine was closed")
        self._finalizer()

    def check_usable(self) -> None:
        self._engine.check_owner()
        self._protocol.check()

    def _end(self, reason: str) -> None:
        """No output and no answer will come any more."""
        self._protocol.end(reason)
        self._has_news.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    async def _receive(self) -> list[bytes]:
        """The next message's frames. Raises why there will be none."""
        while not self._inbox:
            self.check_usable()
            self._has_news.clear()
            await self._has_news.wait()
        frames = self._inbox.popleft()
        if self._is_behind and not self._inbox:
            self._pump()
        return frames

    def _take(self, frames: list[bytes], on_phase: PhaseCallback | None = None) -> list[EngineCoreOutput]:
        was_open = self._protocol.is_open
        try:
            return self._connection.take(frames, time.monotonic(), on_phase)
        finally:
            if self._protocol.outbox:
                self._pump()
            if self._protocol.facts is not None and not was_open:
                self.facts = self._protocol.facts

    def _follow_connection(self) -> None:
        self._connection.follow_connection(time.monotonic())
        self._pump()

    def _pump(self) -> None:
        """Send and receive until neither goes on: only then does the socket raise its edge again."""
        if not self._finalizer.alive:
            return
        connection, inbox, outbox = self._connection, self._inbox, self._protocol.outbox
        now = time.monotonic()
        while True:
            connection.send_waiting(now)
            events = self._socket.events
            if events & POLLIN and len(inbox) < _MAX_INBOX:
                if (frames := connection.receive(now)) is not None:
                    inbox.append(frames)
            elif not (events & POLLOUT and outbox):
                break
        self._is_behind = bool(events & POLLIN)
        if inbox or self._protocol.end_reason is not None:
            self._has_news.set()
        self._set_timer()

    def _set_timer(self) -> None:
        """While something is awaited, the protocol is told the time when it asks for it."""
        at = None if self._protocol.is_idle else self._protocol.next_deadline
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        now = time.monotonic()
        if self._inbox:
            self._protocol.note_heard(now)  # it is this side that is slow
        self._protocol.time_passed(now)
        if self._connection.is_restart_due(now):
            self._loop.remove_reader(self._engine.exit_fd)
            self._connection.start_engine()
            self._loop.add_reader(self._engine.exit_fd, self._on_engine_exit)
        self._pump()

    def _on_engine_exit(self) -> None:
        self._loop.remove_reader(self._engine.exit_fd)
        self._loop.call_later(self._engine.last_words_ms / 1000, self._on_engine_gone)

    def _on_engine_gone(self) -> None:
        if self._finalizer.alive:
            self._pump()
            self._connection.look_at_engine(time.monotonic())
            self._pump()
