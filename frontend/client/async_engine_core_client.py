"""AsyncMPClient: the EngineCoreClient of an event loop, with engines of its own or a daemon's.

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
from ...ipc.errors import EngineDeadError, EngineStartError, QuireError
from ...ipc.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineFacts,
    EngineRoster,
    FrontendCounts,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.sockets import POLLIN, POLLOUT
from .engine_connection import PhaseCallback
from .engine_core_client import ATTACH_TIMEOUT_S, UTILITY_TIMEOUT_S, EngineCoreClient, make_call_timeout
from .engine_links import EngineLink, EngineLinks
from .engines import Engine, find_engines, start_engines

_MAX_INBOX = 64  # messages read ahead of the consumer; more stay in the socket, whose limit the engine sees


async def make_async_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> AsyncMPClient:
    """Start private engines and wait until they are ready. Raises ModelError, ConfigError, EngineStartError.

    An engine core is a process of its own in every case.
    """
    client = AsyncMPClient(start_engines(config))
    await client.wait_until_ready(config.ready_timeout_s, on_phase)
    return client


async def attach_async_client(name: str, client_kind: str, weight: float = 1.0) -> AsyncMPClient:
    """Attach to a running daemon. Raises DaemonError when there is none of this name."""
    client = AsyncMPClient(find_engines(name), client_kind=client_kind, weight=weight)
    await client.wait_until_ready(ATTACH_TIMEOUT_S)
    return client


class AsyncMPClient(EngineCoreClient):
    """Used from one event loop. An engine may be replaced by another: client_protocol.py says how."""

    def __init__(
        self, engines: Sequence[Engine], *, client_kind: str = "private", weight: float = 1.0
    ) -> None:
        self._links = EngineLinks(engines, client_kind, weight)
        self._finalizer = weakref.finalize(self, self._links.close)
        self._inbox: deque[tuple[EngineLink, list[bytes]]] = deque()
        self._unsent: list[EngineCoreRequest] = []  # of this turn of the loop
        self._behind: set[EngineLink] = set()  # of which more has come than the inbox takes
        self._has_news = asyncio.Event()  # the inbox has grown, or an engine has ended
        self._calls: dict[tuple[EngineLink, int], asyncio.Future[UtilityResult]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._loop = asyncio.get_running_loop()
        for link in self._links:
            self._watch(link)

    @property
    def is_connected(self) -> bool:
        """False while every engine is being restarted; requests wait and go on afterwards."""
        return self._links.are_open

    @property
    def engines(self) -> dict[int, EngineFacts]:
        """What each engine that is there says of itself, by its number; one alone is 0."""
        return self._links.facts

    async def wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None = None) -> None:
        """Start-up's other half. Raises like `make_async_client`, and then has ended the engines."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._links.are_ready:
                    self._take(*await self._receive(), on_phase)
        except TimeoutError:
            self.close()
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise
        self._links.form_group()
        self.startup = self._links.first.engine.measure_startup(self.facts)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.check_usable()
        self._links.target.add_requests(requests, time.monotonic())
        self._pump_all()

    def add_requests_soon(self, requests: Sequence[EngineCoreRequest]) -> None:
        """As `add_requests`, in one message with whatever else is added in this turn of the loop.

        A message costs this process and the core about as much as a short text does.
        """
        self.check_usable()
        if not self._unsent:
            self._loop.call_soon(self._send_unsent)
        self._unsent += requests

    def _send_unsent(self) -> None:
        if self._unsent and not self._links.have_ended:
            requests, self._unsent = self._unsent, []
            self._links.target.add_requests(requests, time.monotonic())
            self._pump_all()

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._send_unsent()
            self._links.target.abort_requests(request_ids)
            self._pump_all()

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        """As AsyncLLM's."""
        self.check_usable()
        self._send_unsent()
        self._links.target.abort_named(names, tenant)
        self._pump_all()

    def add_counts(self, counts: FrontendCounts) -> None:
        """As AsyncLLM's."""
        self.check_usable()
        self._links.target.add_counts(counts)
        self._pump_all()

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for outputs; called by one task only, which also resolves utility calls.

        Raises EngineDeadError with the cause when the engine has ended; so does every call that still waits.
        """
        try:
            while True:
                link, frames = await self._receive()
                if outputs := self._take(link, frames):
                    return outputs
                for call_id, result in link.protocol.answers.items():
                    answer = self._calls.get((link, call_id))
                    if answer is not None and not answer.done():
                        answer.set_result(result)
        except Exception as error:
            self._end(str(error))
            raise

    async def call_utility(self, method: UtilityMethod, engine: int | None = None) -> UtilityResult:
        """Call an engine, None: any; the answer comes through the task that runs `get_outputs`."""
        self.check_usable()
        link = self._links.find(engine)
        call_id = link.protocol.start_call(method)
        answer = self._calls[link, call_id] = self._loop.create_future()
        try:
            self._pump(link)
            async with asyncio.timeout(UTILITY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise make_call_timeout(method, UTILITY_TIMEOUT_S) from None
        finally:
            link.protocol.end_call(call_id)
            del self._calls[link, call_id]

    def close(self) -> None:
        if self._finalizer.alive:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                for link in self._links:
                    self._unwatch(link)
                if self._timer is not None:
                    self._timer.cancel()
        with contextlib.suppress(RuntimeError):  # as above: then nobody waits any more
            self._end("the engine was closed")
        self._finalizer()

    def check_usable(self) -> None:
        self._links.check()

    def _end(self, reason: str) -> None:
        """No output and no answer will come any more."""
        self._links.end(reason)
        self._has_news.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    async def _receive(self) -> tuple[EngineLink, list[bytes]]:
        """The next message's frames, and whose it is. Raises why there will be none."""
        while not self._inbox:
            self.check_usable()
            self._has_news.clear()
            await self._has_news.wait()
        received = self._inbox.popleft()
        if self._behind and not self._inbox:
            for link in list(self._behind):
                self._pump(link)
        return received

    def _take(
        self, link: EngineLink, frames: list[bytes], on_phase: PhaseCallback | None = None
    ) -> list[EngineCoreOutput]:
        was_open = link.protocol.is_open
        try:
            outputs = link.connection.take(frames, time.monotonic(), on_phase)
        except QuireError:
            if not self._links.can_lose(link) or link.protocol.end_reason is None:
                raise
            self._lose(link)
            return []
        finally:
            if link.protocol.outbox:
                self._pump(link)
            if link.protocol.facts is not None and not was_open and self._links.shows_facts_of(link):
                self.facts = link.protocol.facts
        if self._links.group is not None:
            self._links.group.note_outputs(outputs)
            self._settle()
        if (roster := self._links.find_news(link)) is not None:
            self._follow(roster)
        return outputs

    # The engines.

    def _watch(self, link: EngineLink) -> None:
        """Follow what happens to an engine from now on."""
        self._loop.add_reader(link.socket.fd, self._pump, link)
        self._loop.add_reader(link.socket.monitor_fd, self._follow_connection, link)
        self._loop.add_reader(link.engine.exit_fd, self._on_engine_exit, link)
        self._follow_connection(link)

    def _unwatch(self, link: EngineLink) -> None:
        self._behind.discard(link)
        for fd in (link.socket.fd, link.socket.monitor_fd, link.engine.exit_fd):
            self._loop.remove_reader(fd)

    def _follow(self, roster: EngineRoster) -> None:
        """The group has changed."""
        added, gone = self._links.follow(roster)
        for link in added:
            self._watch(link)
        for link in gone:
            if self._links.can_lose(link):
                self._lose(link)
        self._settle()

    def _lose(self, link: EngineLink) -> None:
        """It has ended for good, and others go on."""
        self._links.lose(link, time.monotonic())
        self._unwatch(link)
        link.close()
        self.facts = self._links.first.protocol.facts or self.facts
        for (called, _), answer in self._calls.items():
            if called is link and not answer.done():
                answer.set_exception(EngineDeadError(link.protocol.end_reason))
        self._settle()

    def _settle(self) -> None:
        """Move what a lost engine has to others, and send it to them."""
        if self._links.group is not None and self._links.group.settle(time.monotonic()):
            for link in list(self._links):
                if link.protocol.outbox:
                    self._pump(link)

    def _follow_connection(self, link: EngineLink) -> None:
        link.connection.follow_connection(time.monotonic())
        self._pump(link)
        self._settle()

    def _pump_all(self) -> None:
        for link in self._links:
            self._pump(link)

    def _pump(self, link: EngineLink) -> None:
        """Send and receive until neither goes on: only then does the socket raise its edge again."""
        if not self._finalizer.alive or link.is_gone:
            return
        connection, socket, inbox, outbox = link.connection, link.socket, self._inbox, link.protocol.outbox
        now = time.monotonic()
        while True:
            connection.send_waiting(now)
            events = socket.events
            if events & POLLIN and len(inbox) < _MAX_INBOX:
                if (frames := connection.receive(now)) is not None:
                    inbox.append((link, frames))
            elif not (events & POLLOUT and outbox):
                break
        if events & POLLIN:
            self._behind.add(link)
        else:
            self._behind.discard(link)
        if inbox or link.protocol.end_reason is not None:
            self._has_news.set()
        self._set_timer(link)

    def _set_timer(self, link: EngineLink) -> None:
        """While something is awaited, the protocols are told the time when they ask for it."""
        at = None if link.protocol.is_idle else link.protocol.next_deadline
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._on_deadline)

    def _on_deadline(self) -> None:
        self._timer = None
        now = time.monotonic()
        for link in list(self._links):
            if self._inbox:
                link.protocol.note_heard(now)  # it is this side that is slow
            link.protocol.time_passed(now)
            if link.connection.is_restart_due(now):
                self._loop.remove_reader(link.engine.exit_fd)
                link.connection.start_engine()
                self._loop.add_reader(link.engine.exit_fd, self._on_engine_exit, link)
            self._pump(link)
        self._settle()

    def _on_engine_exit(self, link: EngineLink) -> None:
        self._loop.remove_reader(link.engine.exit_fd)
        self._loop.call_later(link.engine.last_words_ms / 1000, self._on_engine_gone, link)

    def _on_engine_gone(self, link: EngineLink) -> None:
        if self._finalizer.alive and not link.is_gone:
            self._pump(link)
            link.connection.look_at_engine(time.monotonic())
            if link.protocol.end_reason is not None and self._links.can_lose(link):
                self._lose(link)
            self._pump(link)
            self._settle()
