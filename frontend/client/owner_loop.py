"""The event loop that an object belongs to, and the process in which it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from ...ipc.errors import EngineDeadError, WrongEventLoopError


class OwnerLoop:
    """An AsyncLLM's event loop. `take` makes the running one the owner; until then there is none."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    @property
    def is_alive(self) -> bool:
        """There is one, and it has not been closed."""
        return self._loop is not None and not self._loop.is_closed()

    def take(self) -> None:
        """Belong to the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    def check(self) -> None:
        """Raise in a fork and in another event loop than the owner's, or when that has ended."""
        running = _find_running_loop()  # none in a fork, too
        if running is self._loop or self._loop is None:
            return
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this process is a fork of the one that this AsyncLLM belongs to (pid {self._pid}); "
                "make one in each process"
            )
        if running is not None or self._loop.is_closed():
            ended = ", which has ended" if self._loop.is_closed() else ""
            raise WrongEventLoopError(
                f"this AsyncLLM belongs to the event loop that it was started in{ended}; "
                "use it there, or shut it down and make another one"
            )

    def do(self, work: Callable[[], None]) -> bool:
        """Do it now where that is safe, which is True; else soon in the loop that runs in another thread."""
        if os.getpid() != self._pid:  # the loop's selector is the parent's, too
            return True
        loop = self._loop
        if loop is not None and loop.is_running() and _find_running_loop() is not loop:
            with contextlib.suppress(RuntimeError):  # closed at this moment
                loop.call_soon_threadsafe(work)
                return False
        work()
        return True


def _find_running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
