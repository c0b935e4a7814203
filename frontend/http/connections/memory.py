"""Gives back to the kernel what large requests took: malloc keeps it for the next ones.

Knows no connections: who has ended a large request says so.
"""

from __future__ import annotations

import asyncio

from ....ipc.processes.heap import trim_heap

LARGE_BYTES = 2**17  # of a body; what smaller ones leave is soon taken again
_DELAY_S = 1.0


class MemoryTrimmer:
    """Of one process. Methods are called in its event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def note_ended(self, size_bytes: int) -> None:
        """A request with a body of that size has been answered, or its client has left."""
        if size_bytes >= LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, trim_heap)
