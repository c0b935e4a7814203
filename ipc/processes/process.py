"""Child processes: how they are started, watched and ended, and how a child notices that its parent is gone.

A child is a module of its parent's Quire (`module_command`) with a pipe as standard input: first its
arguments, later end-of-file, when the parent is gone or wants it to end. Nothing is forked and no `__main__`
is re-run, so it works in scripts without a guard and in notebooks. The parent-death signal would not do: it
fires when the starting *thread* ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from .own_sources import PACKAGE_DIR, check_own_sources, note_own_sources
from .process_limits import open_closed_streams

EXIT_OK = 0
EXIT_CRASHED = 1  # an exception that nobody expected; the traceback is on stderr
EXIT_START_FAILED = 10  # after a Refusal or WorkerFailed that says why
EXIT_PARENT_LOST = 11
EXIT_WORKER_LOST = 12
EXIT_CORE_LOST = 13
EXIT_NODE_LOST = 14
EXIT_DEVICE_LOST = 15  # after a WorkerFailed that says why
_EXIT_NAMES = {
    EXIT_CRASHED: "crashed",
    EXIT_START_FAILED: "start failed",
    EXIT_PARENT_LOST: "lost its parent",
    EXIT_WORKER_LOST: "lost its worker",
    EXIT_CORE_LOST: "lost its engine core",
    EXIT_NODE_LOST: "lost its node",
    EXIT_DEVICE_LOST: "lost its device",
}

_LENGTH = struct.Struct("<I")
_PARENT_CHECK_INTERVAL_S = 0.5
_STACK_DUMP_SIGNAL = signal.SIGUSR1


class ProcessHandle(ABC):
    """A process that this one may end. `pid_fd` becomes readable when it has ended."""

    def __init__(self, role: str, pid: int) -> None:
        self.role = role
        self.pid = pid
        self.pid_fd: int = os.pidfd_open(pid)
        self._killed_because: str | None = None

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """The exit code: None while it runs, negative for a signal."""

    @property
    def is_computing(self) -> bool:
        """Whether any of its threads runs or is ready to run."""
        return is_computing(self.pid)

    @property
    def cpu_time_s(self) -> float:
        """Seconds that its threads have computed so far, including system calls; 0.0 if it is gone."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
            return sum(map(int, fields[_UTIME : _UTIME + 2])) / _TICKS_PER_S
        return 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return is_stopped(self.pid)

    def describe_exit(self) -> str:
        """'worker (pid 7) was killed by SIGKILL' or '... exited with code 1 (crashed)'."""
        who, code = f"{self.role} (pid {self.pid})", self.exit_code
        if code is None:
            return f"{who} is running"
        if code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}{self._because}"
        name = _EXIT_NAMES.get(code)
        return f"{who} exited with code {code}" + (f" ({name})" if name else "")

    @property
    def _because(self) -> str:
        return "" if self._killed_because is None else f": {self._killed_because}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pid_fd, number)

    def dump_stacks(self) -> None:
        """Have the process write its stacks to standard error, if it has called `enable_stack_dumps`."""
        if has_handler(self.pid, _STACK_DUMP_SIGNAL):
            self.send_signal(_STACK_DUMP_SIGNAL)

    def kill(self, because: str) -> None:
        """Send SIGKILL, without waiting, unless it has ended; `describe_exit` will give the reason."""
        if self.exit_code is None:
            self._killed_because = because
            self.send_signal(signal.SIGKILL)

    @abstractmethod
    def close_lifeline(self) -> None:
        """Ask it to end, without waiting. Idempotent."""

    def stop(self, grace_s: float) -> int:
        """End it: lifeline first, SIGKILL after `grace_s`. Returns its exit code. Idempotent."""
        self.close_lifeline()
        if self.pid_fd >= 0:
            if not wait_readable(self.pid_fd, grace_s):
                self.send_signal(signal.SIGKILL)
                wait_readable(self.pid_fd, None)
            self._reap()
            self._close_pid_fd()
        return self._reap()

    @abstractmethod
    def _reap(self) -> int:
        """The exit code of a process that has ended."""

    def _close_pid_fd(self) -> None:
        os.close(self.pid_fd)
        self.pid_fd = -1


class ChildProcess(ProcessHandle):
    """A process that this one has started."""

    def __init__(self, role: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(role, process.pid)
        self._process = process

    @classmethod
    def start(
        cls,
        module: str,
        role: str,
        args: bytes,
        env: dict[str, str] | None = None,
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> ChildProcess:
        """Start a child and hand it `args`. `env` is added to this process's environment.

        The child has its own session: Ctrl-C reaches only the user's program, which then ends it. stdout and
        stderr are file descriptors, None for this process's; `pass_fds` stay open in the child. Raises
        FilesChangedError if Quire's sources have changed since this process started.
        """
        check_own_sources()
        process = subprocess.Popen(
            module_command(module, role),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        child = cls(role, process)
        assert process.stdin is not None
        try:
            process.stdin.write(pack_args(args))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once, as its exit code will say
        note_own_sources()  # while the child starts
        return child

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def close_lifeline(self) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def _reap(self) -> int:
        return self._process.wait()

    def detach(self) -> None:
        """Let it live on without this process, which does not wait for it any more."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(LET_GO)
                self._process.stdin.flush()
        self.close_lifeline()
        self._close_pid_fd()
        self._process.returncode = 0  # else Popen warns that it still runs


LET_GO = b"."  # the last byte of a lifeline whose end-of-file does not end the child


class Lifeline:
    """The child's end of the pipe. Made first thing in a child's main."""

    def __init__(self) -> None:
        open_closed_streams()
        self.fd = os.dup(0)  # readable when the parent is gone; a copy, as libraries may read standard input
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._parent_pid = os.getppid()
        self._is_let_go = False
        self.args = self._read_args()
        continue_at_end(self.fd)

    def watch(self, grace_s: float) -> None:
        """End this process `grace_s` after the parent is gone, from a daemon thread.

        The thread also checks the parent's pid: a process that the parent forked may hold the pipe open.
        """
        threading.Thread(target=self._watch, args=(grace_s,), name="lifeline", daemon=True).start()

    def let_go(self) -> None:
        """The process has another owner: `watch` no longer ends it."""
        self._is_let_go = True

    def _watch(self, grace_s: float) -> None:
        while os.getppid() == self._parent_pid:
            if wait_readable(self.fd, _PARENT_CHECK_INTERVAL_S):
                break
        time.sleep(grace_s)
        if not self._is_let_go:
            os._exit(EXIT_PARENT_LOST)

    def _read_args(self) -> bytes:
        try:
            return read_args(lambda size: os.read(self.fd, size))
        except ConnectionResetError:
            os._exit(EXIT_PARENT_LOST)


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this process's own Quire, whichever is first on Python's path."""
    return [sys.executable, "-P", f"{PACKAGE_DIR}/ipc/processes/run_module.py", module, *arguments]


def pack_args(args: bytes) -> bytes:
    """A child's arguments as they are written to it."""
    return _LENGTH.pack(len(args)) + args


def read_args(read: Callable[[int], bytes]) -> bytes:
    """The arguments that `pack_args` has packed. Raises ConnectionResetError when they end too early."""
    (size,) = _LENGTH.unpack(_read_exactly(read, _LENGTH.size))
    return _read_exactly(read, size)


def _read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = read(size)
        if not part:
            raise ConnectionResetError("the arguments are not complete")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def continue_at_end(fd: int) -> None:
    """Have the kernel continue this process (SIGCONT) at the end-of-file of a pipe or socket, which a stopped
    process would not see: it would keep its memory and device for ever.
    """
    with contextlib.suppress(OSError):  # a sandbox may not have it
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def enable_stack_dumps() -> None:
    """Write the stacks of all threads to standard error on SIGUSR1 and on fatal signals.

    faulthandler does it in the signal handler, hence also while a thread holds the interpreter's lock.
    """
    faulthandler.enable()
    faulthandler.register(_STACK_DUMP_SIGNAL, all_threads=True)


def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until there is something to read, or a pidfd's process has ended; False after `timeout_s`.

    By poll, since select() takes no descriptors above 1,023.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else 1000 * max(0.0, timeout_s)))


def catch_signals(*numbers: signal.Signals) -> socket.socket:
    """Have these signals only make the returned socket readable, with a byte each that says which."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in numbers:
        signal.signal(number, lambda _number, _frame: None)
    return reader


_COMPUTING_STATES = frozenset("RD")  # running or ready to run, and in an uninterruptible system call
_STOPPED_STATE = "T"  # by a signal; t is by a debugger
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME = 11  # its place among the fields after the name; stime follows


def is_computing(pid: int) -> bool:
    """Whether any of its threads runs or is ready to run, which includes one that gets no processor, and one
    that holds the interpreter's lock while the main thread waits for it.
    """
    return not _COMPUTING_STATES.isdisjoint(_read_states(pid))


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it."""
    return _STOPPED_STATE in _read_states(pid)


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether it has a handler for this signal (SigCgt)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _read_states(pid: int) -> set[str]:
    """The states of its threads; none if it is gone."""
    states: set[str] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # this thread has ended
                # The name is in parentheses and may hold anything; the state is the letter after it.
                states.add(task.joinpath("stat").read_text(errors="replace").rpartition(") ")[2][:1])
    return states
