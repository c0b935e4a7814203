"""LoopThread: an event loop in a thread of its own, for callers that wait. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from ...ipc.errors import EngineDeadError

T = TypeVar("T")

# A signal that comes just before a thread goes to sleep does not wake it: Python sees it when it wakes next.
_INTERRUPT_S = 0.25
_CLOSE_TIMEOUT_S = 5.0  # engines end within 2 s
CLOSED = "the engine was closed"


class Gate:
    """One thread waits, others `open`. Neither takes a lock that Ctrl-C in the other could leave taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        """Until `open` has been called since the last `wait`. Ctrl-C ends it."""
        while not self._lock.acquire(timeout=_INTERRUPT_S):
            pass

    def open(self) -> None:
        """Let it go on."""
        with contextlib.suppress(RuntimeError):  # it is open
            self._lock.release()


class LoopThread:
    """Calls take effect in the order in which they are made.

    Ctrl-C ends a caller's wait, never what the loop is doing. In a fork of the process that made it every
    call raises EngineDeadError at once: the thread does not exist there.
    """

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call[Any]] = set()  # those that somebody waits for
        self._thread = threading.Thread(target=self._run, name="quire-client", daemon=True)
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process that made this."""
        return os.getpid() != self._owner_pid

    def check_owner(self) -> None:
        """Raise EngineDeadError in a fork."""
        if self.is_forked:
            raise EngineDeadError(
                f"this process is a fork of the one that the engine belongs to (pid {self._owner_pid}); "
                "make an engine, or attach to a daemon, in each process"
            )

    def run(self, make_work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine there and wait for what it returns or raises. Ctrl-C here cancels it."""
        call = _Call[T]()
        return self._wait(call, call.start, make_work)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function there and wait for what it returns or raises."""
        if threading.current_thread() is self._thread:  # where the garbage collector has ended a generator
            return function(*args)
        call = _Call[T]()
        return self._wait(call, call.act, functools.partial(function, *args))

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a function called there, without waiting. Raises EngineDeadError after `close`."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has been closed
            raise EngineDeadError(CLOSED) from None

    def close(self, finish: Callable[[], None]) -> None:
        """Call `finish` there, then end the thread; calls that wait raise EngineDeadError.

        From any thread, also the loop's own, where the garbage collector may have found the owner. Nothing in
        a fork.
        """
        if self.is_forked:
            return
        if threading.current_thread() is self._thread:
            self._finish(finish)
            return
        with contextlib.suppress(EngineDeadError):
            self.post(self._finish, finish)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _wait(self, call: _Call[T], begin: Callable[[Any], None], work: Callable[[], Any]) -> T:
        self.check_owner()
        self._calls.add(call)
        try:
            self.post(begin, work)
            call.gate.wait()
        except BaseException:
            with contextlib.suppress(EngineDeadError):
                self.post(call.cancel)
            raise
        finally:
            self._calls.discard(call)
        return call.take()

    def _finish(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        finally:
            self._loop.stop()

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
        finally:
            loop.close()
            for call in list(self._calls):  # they came too late
                call.fail(EngineDeadError(CLOSED))


class _Call(Generic[T]):
    """What another thread waits for."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._result: list[T] = []
        self._error: BaseException | None = None

    def act(self, function: Callable[[], T]) -> None:
        try:
            self._result.append(function())
        except BaseException as error:
            self._error = error
        self.gate.open()

    def start(self, make_work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        if not self._is_cancelled:
            self._task = asyncio.get_running_loop().create_task(self._run(make_work))

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def fail(self, error: BaseException) -> None:
        if not self._result and self._error is None:
            self._error = error
            self.gate.open()

    def take(self) -> T:
        """What it returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    async def _run(self, make_work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            self._result.append(await make_work())
        except asyncio.CancelledError:
            self.fail(EngineDeadError(CLOSED))
            raise
        except BaseException as error:
            self._error = error
        self.gate.open()
