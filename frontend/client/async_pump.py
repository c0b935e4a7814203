"""AsyncPump: moves messages between the sockets of a client's engines and its inbox, in an event loop.

A ZeroMQ socket's descriptor is edge-triggered, and every call on the socket, also a send, may swallow the
edge. So one rule holds here: nothing but `_run` touches the socket, and it goes on until both ways are dry.
The monitor of its connection is another socket, drained by each call of EngineConnection.follow_connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ...ipc.processes.due import find_earliest
from ...ipc.protocol.sockets import POLLIN, POLLOUT
from .engine_links import EngineLink, EngineLinks

_pumps = weakref.WeakSet["AsyncPump"]()


def _stop_in_fork() -> None:
    """A callback that waited in the parent's loop must not touch a socket here, where its thread is not."""
    for pump in _pumps:
        pump.is_stopped = True


os.register_at_fork(after_in_child=_stop_in_fork)

_MAX_INBOX = 64  # messages read ahead of the consumer; more stay in the socket, whose limit the engine sees


class AsyncPump:
    """Belongs to the running event loop."""

    def __init__(
        self,
        links: EngineLinks[EngineLink],
        on_lost: Callable[[EngineLink], None],
        on_failure: Callable[[str], None],
    ) -> None:
        """`on_lost` is told of an engine that has ended for good while others go on, `on_failure` why nothing
        is moved any more.
        """
        self._links = links
        links.on_added, links.on_lost = self._watch, self._forget
        self._on_lost = on_lost
        self._on_failure = on_failure
        self.is_stopped = False  # nothing is touched any more
        _pumps.add(self)
        self._inbox: deque[tuple[EngineLink, list[bytes]]] = deque()
        self._behind: set[EngineLink] = set()  # of which more has come than the inbox takes
        self._has_news = asyncio.Event()  # the inbox has grown, an engine has ended, or `wake`
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._loop = asyncio.get_running_loop()
        for link in links:
            self._watch(link)

    async def receive(self) -> tuple[EngineLink, list[bytes]]:
        """The next message's frames, and whose it is. Raises why there will be none."""
        while not await self.wait():
            pass
        return self.take()

    async def wait(self) -> bool:
        """Until there is a message, or `wake` is called: then False. Raises why there will be none."""
        if not self._inbox:
            self._links.check()
            await self._has_news.wait()
            self._has_news.clear()
        return bool(self._inbox)

    def take(self) -> tuple[EngineLink, list[bytes]]:
        """The next message's frames, and whose it is."""
        received = self._inbox.popleft()
        if self._behind and not self._inbox:
            for link in list(self._behind):
                self.run(link)
        return received

    def wake(self) -> None:
        """End a `wait`."""
        self._has_news.set()

    def guard(self, act: Callable[..., None], *args: Any) -> None:
        """Call a callback of the loop: what it raises must end who waits, and the loop would only log it."""
        if self.is_stopped:
            return
        try:
            act(*args)
        except Exception as error:
            self.stop()
            self._on_failure(f"the connection to the engine failed: {type(error).__name__}: {error}")

    def run_all(self) -> None:
        """`run` for every engine."""
        for link in list(self._links):
            self._run(link)
        self.settle()

    def run(self, link: EngineLink) -> None:
        """Send and receive all that can be, and move what a lost engine had."""
        self._run(link)
        self.settle()

    def _run(self, link: EngineLink) -> None:
        """Send and receive until neither goes on: only then does the socket raise its edge again. Then an
        engine is lost that has ended for good.
        """
        if self.is_stopped or link.is_gone:
            return
        connection, socket, inbox = link.connection, link.socket, self._inbox
        now = time.monotonic()
        while True:
            connection.send_waiting(now)
            events = socket.events
            if events & POLLIN and len(inbox) < _MAX_INBOX:
                if (frames := connection.receive(now)) is not None:
                    inbox.append((link, frames))
            elif not (events & POLLOUT and connection.may_send):
                break
        if events & POLLIN:
            self._behind.add(link)
        elif self._behind:
            self._behind.discard(link)
        if inbox or link.protocol.answers or link.protocol.end_reason is not None:
            self._has_news.set()
        self._set_timer(link)
        if self._links.lose_if_ended(link, now):
            self.settle()

    def settle(self) -> None:
        """Move what a lost engine has to others, and send it to them."""
        if self._links.group is not None and self._links.group.settle(time.monotonic()):
            for link in list(self._links):
                if link.protocol.outbox:
                    self._run(link)

    def stop(self) -> None:
        """Touch nothing any more; the loop may be closed already."""
        self.is_stopped = True
        with contextlib.suppress(RuntimeError):
            for link in self._links:
                self._unwatch(link)
            if self._timer is not None:
                self._timer.cancel()

    def _watch(self, link: EngineLink) -> None:
        """Follow what happens to an engine from now on."""
        self._loop.add_reader(link.socket.fd, self.guard, self.run, link)
        self._loop.add_reader(link.socket.monitor_fd, self.guard, self._follow_connection, link)
        self._watch_exit(link)
        self._follow_connection(link)

    def _forget(self, link: EngineLink) -> None:
        self._unwatch(link)
        self._on_lost(link)

    def _watch_exit(self, link: EngineLink) -> None:
        self._loop.add_reader(link.engine.exit_fd, self.guard, self._on_engine_exit, link)

    def _unwatch(self, link: EngineLink) -> None:
        self._behind.discard(link)
        for fd in (link.socket.fd, link.socket.monitor_fd, link.engine.exit_fd):
            self._loop.remove_reader(fd)

    def _follow_connection(self, link: EngineLink) -> None:
        link.connection.follow_connection(time.monotonic())
        self.run(link)

    def _set_timer(self, link: EngineLink) -> None:
        """Have `_on_deadline` called at an engine's next deadline, unless nothing is awaited of it."""
        at = None if link.protocol.is_idle else link.protocol.next_deadline
        if not link.protocol.is_open:
            at = find_earliest(at, self._links.next_search_at)
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        after_s = max(0.0, at - time.monotonic())
        self._timer = self._loop.call_later(after_s, self.guard, self._on_deadline)

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
                self._watch_exit(link)
            self._run(link)
        self._links.search(now)
        self.settle()

    def _on_engine_exit(self, link: EngineLink) -> None:
        self._loop.remove_reader(link.engine.exit_fd)
        after_s = link.engine.last_words_ms / 1000
        self._loop.call_later(after_s, self.guard, self._on_engine_gone, link)

    def _on_engine_gone(self, link: EngineLink) -> None:
        if self.is_stopped:
            return
        self.run(link)  # what it said last
        if not link.is_gone:
            link.connection.look_at_engine(time.monotonic())
            self.run(link)
