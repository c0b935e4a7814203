"""A daemon's mark: an abstract Unix socket named after its run directory, which nobody can delete.

The kernel removes it when its process ends, at no other time: so it says who owns a name though files have
been deleted, and whoever asks gets the daemon's state from it though a disk is full. Files say the same where
it cannot be seen (another network namespace) or cannot be had (somebody else has taken its name).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from pathlib import Path

_BACKLOG = 128
_MAX_ANSWERS = 64  # in a row; the next turn of the owner's loop has the others
_ANSWER_TIMEOUT_S = 0.5  # of an owner that may be stopped: its file says what it was
_CREDENTIALS = struct.Struct("iii")  # struct ucred: pid, uid, gid


class DaemonMark:
    """A claimed mark. `fileno` is readable when somebody asks, who waits for `answer`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    @classmethod
    def claim(cls, directory: Path) -> DaemonMark | None:
        """Claim the mark of a run directory; None if another process has it."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            listener.bind(_name_of(directory))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            return None
        return cls(listener)

    def fileno(self) -> int:
        """The listening socket's descriptor."""
        return self._listener.fileno()

    def answer(self, state: bytes) -> None:
        """Send `state`, which fits in a socket's buffer, to this user's processes that ask."""
        with contextlib.suppress(OSError):  # nobody is left
            for _ in range(_MAX_ANSWERS):
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    if read_peer(connection)[1] == os.getuid():
                        connection.setblocking(False)
                        connection.sendall(state)

    def close(self) -> None:
        """Give up the mark."""
        self._listener.close()


def find_marked_owner(directory: Path) -> int | None:
    """The pid of this user's process that has the directory's mark, None if none is visible."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        return _connect(asking, directory)


def ask_owner(directory: Path) -> bytes | None:
    """The answer of the owner of the directory's mark, None without one or without an answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        if _connect(asking, directory) is None:
            return None
        asking.settimeout(_ANSWER_TIMEOUT_S)
        parts: list[bytes] = []
        try:
            while part := asking.recv(65536):
                parts.append(part)
        except OSError:
            return None
        return b"".join(parts) or None


def read_peer(connection: socket.socket) -> tuple[int, int]:
    """The pid (0 in another namespace) and user id of the other end; before it accepts, of the listener."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _connect(asking: socket.socket, directory: Path) -> int | None:
    asking.setblocking(False)
    try:
        asking.connect(_name_of(directory))
        pid, uid = read_peer(asking)
    except OSError:
        return None
    return pid if pid > 0 and uid == os.getuid() else None


def _name_of(directory: Path) -> str:
    """The abstract name: all users and containers of a network namespace share these, but not paths."""
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = ""
    digest = hashlib.sha256(f"{mounts}:{directory}".encode(errors="surrogateescape")).hexdigest()[:32]
    return f"\0quire-{os.getuid()}-{directory.name}-{digest}"
