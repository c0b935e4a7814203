"""Connections that send much take turns, so that one turn of the event loop reads only so much.

libuv reads a connection for as long as bytes are there, up to 8 MB: 75 uploads held the loop for 1.3 s.
"""

from __future__ import annotations

import asyncio
from collections import deque

from .connection import Connection

_LARGE_READ_BYTES = 2**16  # uvloop reads at most 256 KiB at once
_READERS_A_TURN = 4


class ReadTurns:
    """Of one process. Methods are called in its event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()

    def note_read(self, reader: Connection, num_bytes: int) -> None:
        """So much came in one go: who has read much waits for its next turn."""
        if num_bytes < _LARGE_READ_BYTES:
            return
        reader.pause_reading()
        self._waiting.append(reader)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        for _ in range(min(_READERS_A_TURN, len(self._waiting))):
            self._waiting.popleft().continue_reading()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_turn)
