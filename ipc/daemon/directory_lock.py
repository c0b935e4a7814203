"""The lock of an owner on a directory: open descriptors, which stay whatever becomes of the names.

Both the directory itself is locked, which systemd-tmpfiles respects, and a file in it that has the pid.
Knows nothing of what else lies there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_LOCK_NAME = "lock"


class DirectoryLock:
    """One directory's, held by this process until `close` or `remove`. Made by `take`."""

    def __init__(self, dir_fd: int) -> None:
        self._dir_fd = dir_fd
        self._lock_fd: int | None = None

    @classmethod
    def take(cls, directory: Path) -> DirectoryLock | None:
        """Lock a directory, None if somebody holds it (or it is gone)."""
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        lock = cls(fd)
        # The path is looked at once more: it may have been removed by its owner before it was locked.
        if _try_lock(fd, is_needed=False) and lock.is_at(directory) and lock.lock_file():
            os.fchmod(fd, 0o700)  # whoever made it
            return lock
        lock.close()
        return None

    def is_at(self, path: Path) -> bool:
        """Whether the path still leads to this directory."""
        return _is_same(self._dir_fd, path)

    def is_whole(self, path: Path) -> bool:
        """Whether the directory and its lock file are where they were."""
        return self.is_at(path) and (self._lock_fd is None or _is_same(self._lock_fd, path / _LOCK_NAME))

    def lock_file(self) -> bool:
        """Make and lock the file with this process's pid. False if another process has it.

        On a full disk there is none: the lock on the directory is the one that counts.
        """
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(_LOCK_NAME, flags, 0o600, dir_fd=self._dir_fd)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                return False
            fd = None
        if fd is not None:
            if not _try_lock(fd):
                os.close(fd)
                return False
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        self._lock_fd = fd
        return True

    def empty(self) -> None:
        """Delete what an earlier owner has left."""
        for name in os.listdir(self._dir_fd):
            if name != _LOCK_NAME:
                self._unlink(name)

    def touch(self) -> None:
        """Make everything new, for cleaners that go by age."""
        with contextlib.suppress(OSError):
            os.utime(self._dir_fd)
        for name in os.listdir(self._dir_fd):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=self._dir_fd, follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Delete this directory's files, and its name unless that leads to another one."""
        for name in os.listdir(self._dir_fd):
            self._unlink(name)
        if self.is_at(path):
            with contextlib.suppress(OSError):
                path.rmdir()
        self.close()

    def close(self) -> None:
        """Give the locks up."""
        for fd in (self._lock_fd, self._dir_fd):
            if fd is not None:
                os.close(fd)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._dir_fd)


def find_lock_holder(directory: Path) -> int | None:
    """The pid of the process that holds the directory's lock, None if nobody does (or it has no file)."""
    try:
        fd = os.open(directory / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(fd, 32, 0)
        return int(text) if text.isdigit() else None
    else:
        return None
    finally:
        os.close(fd)


def _try_lock(fd: int, is_needed: bool = True) -> bool:
    """Whether nobody else holds it; NFS has locks on files only, so one on a directory is not `is_needed`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return not is_needed
    return True


def _is_same(fd: int, path: Path) -> bool:
    try:
        found, held = path.lstat(), os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)
