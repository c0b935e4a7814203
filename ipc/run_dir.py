"""Run directories: where an engine's sockets live, private to one user, one owner at a time.

A directory has mode 0700 and a `lock` file that its owner holds (flock) for as long as it lives, so a
directory whose lock can be taken belongs to a dead owner and may be removed or taken over. A private engine's
has a random name that begins with `p-`; a daemon's has the daemon's name.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from .errors import ConfigError, DaemonError, did_you_mean
from .sockets import MAX_IPC_PATH_BYTES, make_ipc_address

_PRIVATE_PREFIX = "p-"
_LOCK_NAME = "lock"
_NUM_LOCK_TRIES = 20
_LOCK_RETRY_S = 0.01
_LONGEST_SOCKET_NAME = "worker.sock1234567"  # with what each worker's has of its own
_DAEMON_NAME = re.compile(r"(?!p-)[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


class RunDirectory:
    """One engine's directory, locked by this process until `remove` (or until this process ends)."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd

    @classmethod
    def create_private(cls) -> RunDirectory:
        """A new directory with a random name. Leftovers of dead owners beside it are removed on the way."""
        name = f"{_PRIVATE_PREFIX}{secrets.token_hex(4)}"
        base = find_base(longest_name=f"{name}/{_LONGEST_SOCKET_NAME}")
        remove_leftovers(base)
        path = base / name
        # Locked under another name first: a half-made directory must not look like a leftover.
        staging = base / f".{path.name}"
        staging.mkdir(mode=0o700)
        lock_fd = _lock(staging)
        assert lock_fd is not None, "a fresh directory is unlocked"
        staging.rename(path)
        return cls(path, lock_fd)

    @classmethod
    def create_named(cls, name: str) -> RunDirectory:
        """A daemon's directory; what a dead daemon of this name left is removed first.

        Raises ConfigError for a name that cannot be one, DaemonError with the owner's pid while one lives.
        """
        path = find_named(name)
        for _ in range(_NUM_LOCK_TRIES):
            path.mkdir(mode=0o700, exist_ok=True)
            lock_fd = _lock(path)
            if lock_fd is None:
                owner = find_owner(path)
                if owner is not None:
                    raise DaemonError(f"a daemon named {name!r} is running already (pid {owner})")
                time.sleep(_LOCK_RETRY_S)  # its owner just removes it, or somebody looks who owns it
                continue
            for leftover in path.iterdir():
                if leftover.name != _LOCK_NAME:
                    leftover.unlink(missing_ok=True)
            return cls(path, lock_fd)
        raise DaemonError(f"the run directory {path} is being made and removed by others")

    def address_of(self, name: str) -> str:
        """The ipc address of a socket in this directory. Raises ConfigError if its path is too long."""
        return make_ipc_address(str(self.path / name))

    def remove(self) -> None:
        """Delete the directory and give up the lock. Idempotent."""
        if self._lock_fd is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = None


def find_named(name: str) -> Path:
    """Where a daemon of this name has its directory. Raises ConfigError for a name that cannot be one."""
    if not _DAEMON_NAME.fullmatch(name):
        raise ConfigError(
            "name", name, "1 to 32 letters, digits, '_' or '-', with a letter or digit first and not 'p-'"
        )
    return find_base(longest_name=f"{name}/{_LONGEST_SOCKET_NAME}") / name


def find_daemon(name: str) -> int:
    """The pid of a running daemon's supervisor. Raises DaemonError if there is none of this name."""
    pid = find_owner(find_named(name))
    if pid is None:
        running = list_daemons()
        hint = did_you_mean(name, running) or f"; those that run: {', '.join(running) or 'none'}"
        raise DaemonError(
            f"no daemon named {name!r} is running{hint}; `quire daemon start --name {name}` starts one"
        )
    return pid


def list_daemons() -> list[str]:
    """Names of the daemons of this user that run now."""
    folders = [path for path in find_base().iterdir() if _DAEMON_NAME.fullmatch(path.name)]
    return sorted(path.name for path in folders if find_owner(path) is not None)


def find_owner(directory: Path) -> int | None:
    """The pid of the process that holds the directory's lock, None if nobody does."""
    try:
        fd = os.open(directory / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
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


def find_base(longest_name: str = "") -> Path:
    """The folder that holds this user's run directories, made if missing.

    `$XDG_RUNTIME_DIR/quire`, or `quire-<uid>` in the temporary folder or /tmp: the first that can be used and
    leaves room for a socket path that ends in `longest_name`. Raises ConfigError if somebody else owns it or
    others may enter it, since whoever can write there can speak to the engine.
    """
    candidates: list[Path] = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        candidates.append(Path(runtime) / "quire")
    candidates += [Path(folder) / f"quire-{os.getuid()}" for folder in (tempfile.gettempdir(), "/tmp")]
    fitting = [base for base in candidates if len(os.fsencode(base / longest_name)) <= MAX_IPC_PATH_BYTES]
    base = (fitting or candidates)[0]
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError("run directory", str(base), "a folder of this user with mode 0700")
    return base


def remove_leftovers(base: Path) -> None:
    """Remove private directories whose owner is dead."""
    for path in base.glob(f"{_PRIVATE_PREFIX}*"):
        lock_fd = _lock(path)
        if lock_fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock_fd)


def _lock(directory: Path) -> int | None:
    """Take the directory's lock: its file descriptor, or None if somebody holds it (or it is gone)."""
    path = directory / _LOCK_NAME
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino != os.fstat(fd).st_ino:
            raise FileNotFoundError(path)  # removed by its owner between the two calls
    except OSError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
