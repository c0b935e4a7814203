"""A spare process: it has done the slow part of a worker's start, and waits to be adopted.

It listens on a Unix socket. A process of the same user that connects and sends arguments adopts it; the
connection is its lifeline from then on. Until then it belongs to the process that started it, which it
outlives by SPARE_GRACE_S: long enough for the next engine core to find it, too short to be left behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from ..daemon.daemon_mark import read_peer
from ..errors import FilesChangedError
from .managed_child import ManagedChild
from .process import (
    EXIT_PARENT_LOST,
    ChildProcess,
    Lifeline,
    ProcessHandle,
    continue_at_end,
    pack_args,
    read_args,
    wait_readable,
)

SPARE_GRACE_S = 1.5  # after its starter's end; a core that replaces another one connects within 0.5 s
_HANDOVER_TIMEOUT_S = 1.0  # the arguments are written right after connecting


def wait_for_adoption(path: str, lifeline: Lifeline) -> bytes:
    """Wait, in the spare, and return the adopter's arguments; the spare then ends with its adopter."""
    hidden = f"{path}{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(hidden)
        listener.listen(1)
        os.replace(hidden, path)  # only now, when it listens
        while True:
            connection, _ = listener.accept()  # without a deadline: the lifeline ends it
            args = _take_args(connection)
            if args is not None:
                break
            connection.close()
    os.unlink(path)
    continue_at_end(connection.fileno())
    lifeline.let_go()
    threading.Thread(target=_end_with, args=(connection,), name="adopter", daemon=True).start()
    return args


def _take_args(connection: socket.socket) -> bytes | None:
    connection.settimeout(_HANDOVER_TIMEOUT_S)
    try:
        if read_peer(connection)[1] != os.getuid():
            return None
        args = read_args(connection.recv)
    except OSError:
        return None
    connection.settimeout(None)
    return args


def _end_with(connection: socket.socket) -> None:
    # By poll: the kernel sends no SIGCONT at the end of a socket while a thread waits in `recv`, so a process
    # that was stopped just before would stay.
    wait_readable(connection.fileno(), None)
    os._exit(EXIT_PARENT_LOST)


class AdoptedProcess(ProcessHandle):
    """An adopted spare, which may be another process's child."""

    def __init__(self, role: str, connection: socket.socket) -> None:
        super().__init__(role, read_peer(connection)[0])
        self._connection = connection
        self._exit_code: int | None = None

    @classmethod
    def adopt(cls, path: str, role: str, args: bytes) -> AdoptedProcess | None:
        """Take the spare that waits at `path`; None if there is none."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_HANDOVER_TIMEOUT_S)
        try:
            connection.connect(path)
            connection.sendall(pack_args(args))
            return cls(role, connection)
        except OSError:
            connection.close()
            return None

    @property
    def exit_code(self) -> int | None:
        """As of every process; EXIT_PARENT_LOST for another process's child."""
        if self._exit_code is None and self.pid_fd >= 0:
            self._exit_code = _find_exit_code(self.pid_fd)
        return self._exit_code

    def describe_exit(self) -> str:
        if self.exit_code == EXIT_PARENT_LOST:  # another process's child: how it ended is not known
            return f"{self.role} (pid {self.pid}) has ended{self._because}"
        return super().describe_exit()

    def close_lifeline(self) -> None:
        self._connection.close()

    def _reap(self) -> int:
        assert self.exit_code is not None
        return self.exit_code


class WarmSpare:
    """Keeps one spare waiting at `path`; `start_spare(path)` starts the process."""

    def __init__(self, path: str, start_spare: Callable[[str], ChildProcess]) -> None:
        self._path = path
        self._child = ManagedChild(lambda: start_spare(path))

    def keep(self) -> None:
        """Start a spare, unless one starts or waits."""
        if self._child.process is None or self._child.process.exit_code is not None:
            with contextlib.suppress(FilesChangedError):  # the next worker's start will raise it
                self._child.start()

    def adopt(self, role: str, args: bytes) -> AdoptedProcess | None:
        """Take the waiting spare, whichever process started it; None if there is none."""
        adopted, child = AdoptedProcess.adopt(self._path, role, args), self._child.process
        if adopted is not None and child is not None and child.pid == adopted.pid:
            child.detach()
            self._child.stop(0.0)
        return adopted

    def stop(self) -> None:
        """End the spare, unless it was adopted. Idempotent."""
        self._child.stop(0.0)


def _find_exit_code(pid_fd: int) -> int | None:
    try:
        result = os.waitid(os.P_PIDFD, pid_fd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:  # another process's child
        return EXIT_PARENT_LOST if wait_readable(pid_fd, 0.0) else None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def find_spare_path(worker_address: str) -> str:
    """Where an engine's spare listens: beside its worker's socket, whose name begins with 'worker'."""
    path = Path(worker_address.removeprefix("ipc://"))
    return str(path.with_name(path.name.replace("worker", "spare", 1)))
