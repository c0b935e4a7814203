"""What processes hold open: file descriptors, sockets and shared memory; and what nobody holds any more."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

SHM_FOLDER = Path("/dev/shm")


class OpenFiles(msgspec.Struct, frozen=True):
    """Counts of one process."""

    num_fds: int
    num_sockets: int  # of the fds
    num_shm: int  # segments that it has mapped


def count_open_files(pid: int) -> OpenFiles:
    """Raises OSError when there is no such process (of this user)."""
    targets: list[str] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    num_sockets = sum(target.startswith("socket:") for target in targets)
    return OpenFiles(len(targets), num_sockets, len(_find_mapped_shm(pid)))


def find_shm_segments() -> set[str]:
    """Names of all shared memory of this machine."""
    return {path.name for path in SHM_FOLDER.iterdir()} if SHM_FOLDER.is_dir() else set()


def find_abandoned_shm(before: set[str]) -> list[str]:
    """New segments that no process has mapped: those of others on this machine may come and go."""
    new = find_shm_segments() - before
    if not new:
        return []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                new -= _find_mapped_shm(int(name))
    return sorted(new & find_shm_segments())


def _find_mapped_shm(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if str(SHM_FOLDER) in line}
    return {path.removeprefix(f"{SHM_FOLDER}/") for path in paths if path.startswith(f"{SHM_FOLDER}/")}
