"""What a process inherits and may have to change: standard streams, limits, priority."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import resource
import sys
import time
from pathlib import Path
from typing import TextIO

_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES = 3
_AUTOGROUP_REST_S = 0.11  # Linux accepts one change in 0.1 s on the whole machine


def open_closed_streams() -> None:
    """Point standard input, output and error at /dev/null where the caller has closed them.

    The next file opened would get their number, and be written to by whoever writes to standard error.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # `fd` itself, the lowest that is free
            os.set_inheritable(null, True)
    # Python has made None of a stream that it found closed.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def speak_any_text() -> None:
    """Where the encoding of a standard stream lacks a character, write its escape; read ASCII as UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")


def discard_unwritable(stream: TextIO) -> None:
    """Flush a stream, or point it at nothing if that fails, as the flush at exit would."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def raise_file_limit() -> int:
    """Raise the limit on file descriptors to the hard limit. Returns the limit that holds.

    The usual soft limit is 1024, a connection takes one, and libzmq ends its process when it gets none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def find_free_address_space() -> int | None:
    """Bytes that this process may still map (ulimit -v), None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return max(0, limit - num_pages * resource.getpagesize())


def describe_shortage(error: BaseException) -> str:
    """The error's text, with the numbers if this process lacks address space."""
    free_bytes = find_free_address_space()
    is_shortage = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if free_bytes is None or not (is_shortage or "allocate memory" in str(error)):
        return str(error)
    return f"{error}: {free_bytes / 1e6:,.0f} MB of address space are left{describe_address_space()}"


def describe_address_space() -> str:
    """A remark on `ulimit -v` for the reason why a worker did not start, or has no room; '' without it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return (
        f" (`ulimit -v` allows each process {limit / 1e6:,.0f} MB of address space; a worker takes some "
        "1,500 MB beside its weights and KV cache)"
    )


def lower_priority(niceness: int) -> None:
    """Raise the nice value; for the only process of its session, as our children are.

    Where Linux shares the processor between sessions (sched_autogroup_enabled), a nice value counts only
    within its session: the session's own value is raised, too.
    """
    os.nice(niceness)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(_AUTOGROUP_TRIES):
        try:
            _AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:
            time.sleep(_AUTOGROUP_REST_S)
        except OSError:  # there are none
            return
        else:
            return
