"""Keeps the cache of GGUF models' folders small: those opened last stay, and those that an engine serves."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from ...ipc.processes.folder_lock import lock_to_remove

SCRATCH_PREFIX = "new-"  # of a folder that is being written or removed
NUM_KEPT = 64
MAX_BYTES = 512 << 20  # a large vocabulary takes 10 to 30 MB
_MAX_SCRATCH_AGE_S = 3600.0  # an older one is of a process that was killed


def note_used(folder: Path) -> None:
    """Count as opened at this moment."""
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(folder)


def remove_old(cache: Path) -> None:
    """Remove what is too much, the longest unused first, but never the one used last."""
    ages_s: dict[Path, float] = {}
    with contextlib.suppress(OSError):  # another process removes them
        for path in cache.iterdir():
            ages_s[path] = time.time() - path.lstat().st_mtime
    total_bytes = num_kept = 0
    for path in sorted(ages_s, key=lambda path: ages_s[path]):
        if path.name.startswith(SCRATCH_PREFIX):
            if ages_s[path] > _MAX_SCRATCH_AGE_S:
                shutil.rmtree(path, ignore_errors=True)
            continue
        total_bytes += _count_bytes(path)
        if num_kept and (num_kept >= NUM_KEPT or total_bytes > MAX_BYTES):
            _remove(path)
        num_kept += 1


def _remove(folder: Path) -> None:
    """Unless a process serves it."""
    with lock_to_remove(folder) as is_free, contextlib.suppress(OSError):
        if is_free:
            # Gone at once, or not at all.
            left = folder.rename(folder.with_name(SCRATCH_PREFIX + folder.name))
            shutil.rmtree(left, ignore_errors=True)


def _count_bytes(folder: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in folder.iterdir())
    except OSError:  # another process removes it
        return 0
