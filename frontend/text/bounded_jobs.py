"""What processes that do text jobs share: frames over a stream socket, and bounds of time and memory.

A frame is a length, a limit in seconds of processor time (0.0 in answers) and a body. Knows no kinds of jobs.
"""

from __future__ import annotations

import resource
import signal
import struct
from collections.abc import Iterator

MAX_TEXT_MEMORY_BYTES = 2 << 30  # of a text process's address space
MAX_RENDER_S = 10.0  # of processor time, in which a conversation is rendered
# A limit of processor time is over on the clock after that many times it, plus:
WALL_FACTOR = 6
WALL_MARGIN_S = 4.0
MEMORY_EXITS = (-signal.SIGABRT, -signal.SIGSEGV)  # a failed allocation in native code; a deep recursion
_HEAD = struct.Struct("<If")


def limit_memory() -> None:
    """Bound this process's address space, so that what eats memory fails here."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_TEXT_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MAX_TEXT_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(limit_s: float) -> None:
    """Processor time of this process from now on, after which SIGPROF ends it; 0.0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)


def make_frame(body: bytes, limit_s: float = 0.0) -> bytes:
    """Bytes for the socket."""
    return _HEAD.pack(len(body), limit_s) + body


class FrameReader:
    """Bytes as they come -> whole frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, float]]:
        """(body, limit in seconds) of each frame that is complete with `data`."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            size, limit_s = _HEAD.unpack_from(self._data)
            end = _HEAD.size + size
            if len(self._data) < end:
                return
            with memoryview(self._data) as view:
                body = bytes(view[_HEAD.size : end])
            del self._data[:end]
            yield body, limit_s
