"""Locks on a folder of a cache: who serves what lies in it keeps it from being removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def keep_folder(folder: str) -> None:
    """Have nobody remove it until this process ends, as far as its file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(folder, _FLAGS), fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def lock_to_remove(folder: Path) -> Generator[bool]:
    """Whether no process keeps it; inside, none begins to. False where that cannot be known."""
    try:
        fd = os.open(folder, _FLAGS)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(fd)
