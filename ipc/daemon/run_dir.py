"""Run directories: where an engine's sockets live, private to one user, one owner at a time.

A private engine's has a random name that begins with `p-`; a daemon's has the daemon's name. Its owner holds
it by what cannot be deleted: locks (DirectoryLock), and for a daemon an abstract socket (daemon_mark.py).
So a cleaner of /tmp may take everything away: the name stays taken, the owner notices it by the inodes and
makes all of it again; and it removes by descriptor, never what has come to lie at its path. A directory that
can be locked belongs to a dead owner: it may be removed or taken over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, DaemonError, EngineStartError, UnknownDaemonError, did_you_mean
from ..protocol.sockets import MAX_IPC_PATH_BYTES, make_ipc_address
from .daemon_mark import DaemonMark, find_marked_owner
from .private_folder import make_folder, make_private_folder

_LOCK_NAME = "lock"


class DirectoryLock:
    """The lock of an owner on a directory, until `close` or `remove`. Made by `take`.

    It is of open descriptors, which stay whatever becomes of the names: both the directory itself is locked,
    which systemd-tmpfiles respects, and a file in it that has the pid. Knows nothing of what else lies there.
    """

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
        at_path, held = path.lstat(), os.fstat(fd)
    except OSError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (held.st_dev, held.st_ino)


_PRIVATE_PREFIX = "p-"
_NUM_LOCK_TRIES = 20
_NUM_MARK_TRIES = 5  # then another user has taken the mark's name, and locks have to do
_LOCK_RETRY_S = 0.01
_TOUCH_INTERVAL_S = 3600.0
_STAGING_AGE_S = 60.0
_LONGEST_SOCKET_NAME = "worker.sock1234567"  # with what each worker's has of its own
_DAEMON_NAME = re.compile(r"(?!p-)[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class RunDirectory:
    """One engine's directory, this process's until `remove` (or until this process ends)."""

    def __init__(self, path: Path, lock: DirectoryLock, mark: DaemonMark | None = None) -> None:
        self.path = path
        self.mark = mark  # of a daemon; None where it cannot be had
        self._lock: DirectoryLock | None = lock
        self._touched_at = time.monotonic()

    @classmethod
    def create_private(cls) -> RunDirectory:
        """A new directory with a random name. Leftovers of dead owners beside it are removed on the way.

        Raises ConfigError or EngineStartError with the reason why there can be none.
        """
        name = f"{_PRIVATE_PREFIX}{secrets.token_hex(4)}"
        base = find_base(longest_name=f"{name}/{_LONGEST_SOCKET_NAME}")
        remove_leftovers(base)
        path = base / name
        # Locked under another name first: a half-made directory must not look like a leftover.
        staging = base / f".{name}"
        make_folder(staging)
        lock = DirectoryLock.take(staging)
        if lock is None:
            staging.rmdir()
            raise EngineStartError(f"the run directory {staging} cannot be locked")
        staging.rename(path)
        return cls(path, lock)

    @classmethod
    def create_named(cls, name: str) -> RunDirectory:
        """A daemon's directory; what a dead daemon of this name left is removed first.

        Raises ConfigError for a name that cannot be one, DaemonError with the owner's pid while one lives,
        EngineStartError if it cannot be made.
        """
        path = find_named(name)
        mark = None
        try:
            for attempt in range(_NUM_LOCK_TRIES):
                mark = mark or DaemonMark.claim(path)
                if mark is None and (owner := find_marked_owner(path)) is not None:
                    raise _make_taken_error(name, owner)
                make_folder(path)
                lock = DirectoryLock.take(path) if mark is not None or attempt >= _NUM_MARK_TRIES else None
                if lock is not None:
                    lock.empty()
                    return cls(path, lock, mark)
                if (owner := find_lock_holder(path)) is not None:
                    raise _make_taken_error(name, owner)
                time.sleep(_LOCK_RETRY_S)  # its owner just removes it, or somebody looks who owns it
            raise DaemonError(f"the run directory {path} is being made and removed by others")
        except BaseException:
            if mark is not None:
                mark.close()
            raise

    def address_of(self, name: str) -> str:
        """The ipc address of a socket in this directory. Raises ConfigError if its path is too long."""
        return make_ipc_address(str(self.path / name))

    def maintain(self) -> bool:
        """Make again what somebody has removed: True if something was missing. Called every second or so.

        What is old is touched, since cleaners go by age. Raises DaemonError if the directory is another's by
        now, ConfigError or EngineStartError if it cannot be made.
        """
        assert self._lock is not None
        if self._lock.is_whole(self.path):
            if time.monotonic() - self._touched_at > _TOUCH_INTERVAL_S:
                self._touched_at = time.monotonic()
                self._lock.touch()
            return False
        if self._lock.is_at(self.path):
            self._lock.lock_file()
            return True
        make_private_folder(self.path.parent)
        make_folder(self.path)
        lock = DirectoryLock.take(self.path)
        if lock is None and (owner := find_lock_holder(self.path)) is not None:
            raise DaemonError(f"the run directory {self.path} was removed, and pid {owner} has the name now")
        if lock is not None:
            self._lock.close()
            self._lock = lock
        return True

    def remove(self) -> None:
        """Delete the directory, if it is still this owner's, and give it up. Idempotent."""
        if self._lock is None:
            return
        self._lock.remove(self.path)
        self._lock = None
        if self.mark is not None:
            self.mark.close()


def find_named(name: str) -> Path:
    """Where a daemon of this name has its directory. Raises ConfigError for a name that cannot be one."""
    if not _DAEMON_NAME.fullmatch(name):
        raise ConfigError(
            "name", name, "1 to 32 letters, digits, '_' or '-', with a letter or digit first and not 'p-'"
        )
    return find_base(longest_name=f"{name}/{_LONGEST_SOCKET_NAME}") / name


def find_daemon(name: str) -> int:
    """The pid of a running daemon's supervisor. Raises UnknownDaemonError if there is none of this name."""
    pid = find_owner(find_named(name))
    if pid is None:
        running = list_daemons()
        hint = did_you_mean(name, running) or f"; those that run: {', '.join(running) or 'none'}"
        raise UnknownDaemonError(name, f"{hint}; `quire daemon start --name {name}` starts one")
    return pid


def list_daemons() -> list[str]:
    """Names of the daemons of this user that run now."""
    folders = [path for path in find_base().iterdir() if _DAEMON_NAME.fullmatch(path.name)]
    return sorted(path.name for path in folders if find_owner(path) is not None)


def find_owner(directory: Path) -> int | None:
    """The pid of the process that owns the directory, None if nobody does."""
    return find_marked_owner(directory) or find_lock_holder(directory)


def find_base(longest_name: str = "") -> Path:
    """The folder that holds this user's run directories, made if missing.

    `$XDG_RUNTIME_DIR/quire`, or `quire-<uid>` in $TMPDIR or /tmp: the first that can be used and
    leaves room for a socket path that ends in `longest_name`. Raises ConfigError if somebody else owns it or
    others may enter it, since whoever can write there can speak to the engine.
    """
    candidates: list[Path] = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        candidates.append(Path(runtime) / "quire")
    # Not tempfile.gettempdir(), which goes elsewhere while a disk is full.
    temporary = os.environ.get("TMPDIR") or "/tmp"
    if not (os.path.isabs(temporary) and os.access(temporary, os.W_OK | os.X_OK)):
        temporary = "/tmp"
    candidates += [Path(folder) / f"quire-{os.getuid()}" for folder in (temporary, "/tmp")]
    fitting = [base for base in candidates if len(os.fsencode(base / longest_name)) <= MAX_IPC_PATH_BYTES]
    base = (fitting or candidates)[0]
    make_private_folder(base)
    return base


def remove_leftovers(base: Path) -> None:
    """Remove private directories whose owner is dead."""
    for path in (*base.glob(f"{_PRIVATE_PREFIX}*"), *_find_old_stagings(base)):
        lock = DirectoryLock.take(path)
        if lock is not None:
            lock.remove(path)


def _find_old_stagings(base: Path) -> Iterator[Path]:
    """Directories that were being made, and are not any more."""
    for path in base.glob(f".{_PRIVATE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STAGING_AGE_S:
                yield path


def _make_taken_error(name: str, owner: int) -> DaemonError:
    return DaemonError(f"a daemon named {name!r} is running already (pid {owner})")
