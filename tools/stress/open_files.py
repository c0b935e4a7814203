"""What processes hold open: file descriptors, sockets and shared memory; and what nobody holds any more."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec

SHM_FOLDER = Path("/dev/shm")
_NUMBER = re.compile(r"(?<![0-9A-Za-z])[0-9]+(?![0-9A-Za-z])")  # no part of a random name


class OpenFiles(msgspec.Struct, frozen=True):
    """Counts of one process."""

    num_fds: int
    num_sockets: int  # of the fds
    num_shm: int  # segments that it has mapped

    def without_children(self, num: int) -> OpenFiles:
        """Without what this process has of so many children: a socket, a pipe and a pidfd of each."""
        return OpenFiles(self.num_fds - 3 * num, self.num_sockets - num, self.num_shm)


def count_open_files(pid: int) -> OpenFiles:
    """Raises OSError when there is no such process (of this user)."""
    targets: list[str] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    num_sockets = sum(target.startswith("socket:") for target in targets)
    return OpenFiles(len(targets), num_sockets, len(_find_mapped_shm(pid)))


class OwnShm:
    """Which shared memory of this machine a run's own processes have made; other programs make some too.

    Quire itself makes none that has a name, so this is of libraries: what a process had mapped when it was
    looked at, and what has the number of one in its name, as Intel's OpenMP has.
    What was there at construction is of others.
    """

    def __init__(self) -> None:
        self._names_before = _find_shm_names()
        self._pids: set[str] = set()
        self._mapped: set[str] = set()

    def note(self, pid: int) -> None:
        """A process of the run."""
        self._pids.add(str(pid))
        with contextlib.suppress(OSError):
            self._mapped |= _find_mapped_shm(pid)

    def find_abandoned(self) -> list[str]:
        """Those that no process has mapped any more."""
        left = {name for name in _find_shm_names() - self._names_before if self._is_own(name)}
        if not left:
            return []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    left -= _find_mapped_shm(int(name))
        return sorted(left & _find_shm_names())

    def _is_own(self, name: str) -> bool:
        return name in self._mapped or not self._pids.isdisjoint(_NUMBER.findall(name))


def _find_shm_names() -> set[str]:
    return {path.name for path in SHM_FOLDER.iterdir()} if SHM_FOLDER.is_dir() else set()


def _find_mapped_shm(pid: int) -> set[str]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if str(SHM_FOLDER) in line}
    return {path.removeprefix(f"{SHM_FOLDER}/") for path in paths if path.startswith(f"{SHM_FOLDER}/")}
