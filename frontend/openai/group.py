"""Several HTTP processes on one listening socket over one engine, and the process that keeps them running.

One that is lost is started again without the others: its connections end, and the engine drops its requests.
Each has a socket to this process, over which it says that it listens and serves, and answers when it is asked
after a silence: one that is stopped or hangs is killed, and then lost as one that died.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from ...ipc.errors import EngineDeadError
from ...ipc.liveness import ChildWatch
from ...ipc.process import EXIT_OK, ChildProcess, catch_signals
from ...ipc.restarts import RestartBudget
from ...ipc.sockets import until_ms
from .options import ServerOptions

HTTP_MODULE = "quire.frontend.openai"
EXIT_ENGINE_LOST = 14  # of an HTTP process whose engine is gone for good
PING, ALIVE, SERVES = b"?", b".", b"!"  # what is said over an HTTP process's socket
_SPEAK_TIMEOUT_S = 60.0  # from an HTTP process's start to its first word: a second's imports, if left alone
_STOP_GRACE_S = 5.0  # beyond the drain time
_logger = logging.getLogger("quire.serve")


class HttpLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP process: which daemon to attach to, where to listen.

    control_fd: a socket on which it says ALIVE when its event loop runs and for every PING, and SERVES when
    it does.
    """

    attach: str
    options: ServerOptions
    listening_fd: int
    control_fd: int


class HttpProcess:
    """One HTTP process, watched from its first word on."""

    def __init__(self, attach: str, options: ServerOptions, listening_socket: socket.socket) -> None:
        self.control, its_end = socket.socketpair()
        self.control.setblocking(False)
        with its_end:
            launch = HttpLaunch(
                attach=attach,
                options=options,
                listening_fd=listening_socket.fileno(),
                control_fd=its_end.fileno(),
            )
            fds = (launch.listening_fd, launch.control_fd)
            self.child = ChildProcess.start(HTTP_MODULE, "http", msgspec.msgpack.encode(launch), pass_fds=fds)
        self.serves = False
        self._watch = ChildWatch(self, time.monotonic())
        self._must_speak_by: float | None = time.monotonic() + _SPEAK_TIMEOUT_S  # None once it has

    @property
    def next_check_at(self) -> float | None:
        """When `look` has something to do. Monotonic."""
        return self._watch.next_check_at if self._must_speak_by is None else self._must_speak_by

    def hear(self) -> bool:
        """Take what it has said; False when it has nothing more to say, because it ends."""
        said = b""
        with contextlib.suppress(OSError):
            said = self.control.recv(4096)
        if not said:
            return False
        if self._must_speak_by is not None:
            self._must_speak_by = None
            self._watch.start(time.monotonic())
        self._watch.note_heard(time.monotonic())
        self.serves = self.serves or SERVES in said
        return True

    def look(self) -> None:
        """Ask it after a silence; kill it when it does not answer, or has not got as far as its loop."""
        now = time.monotonic()
        if self._must_speak_by is not None and now >= self._must_speak_by:
            self.kill(f"it did not start within {_SPEAK_TIMEOUT_S:g} s")
        elif self._watch.look(now):
            with contextlib.suppress(OSError):
                self.control.send(PING)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.child.pid

    def dump_stacks(self) -> None:
        """Have it write its threads' stacks to its standard error."""
        self.child.dump_stacks()

    def kill(self, because: str) -> None:
        """SIGKILL, without waiting."""
        self.child.kill(because)

    def stop(self, grace_s: float) -> None:
        """End it, with SIGKILL after `grace_s`. Idempotent."""
        self.child.stop(grace_s)
        self.control.close()


class HttpGroup:
    """`num_processes` HTTP processes. `run` serves until SIGTERM or SIGINT, then drains them."""

    def __init__(
        self, attach: str, options: ServerOptions, listening_socket: socket.socket, num_processes: int
    ) -> None:
        self._attach = attach
        self._options = msgspec.structs.replace(options, accepts_when_ready=True)
        self._listening_socket = listening_socket
        self._processes: list[HttpProcess] = []
        self._budget = RestartBudget(options.max_http_restarts)
        self._poller = select.poll()
        self._start_times = [0.0] * num_processes  # when those that are missing are due; monotonic
        self._ends_at: float | None = None  # while it drains: when what is left is killed

    def run(self, on_ready: Callable[[], None]) -> int:
        """Returns 0. Raises EngineDeadError when the engine is gone, or the processes keep being lost.

        `on_ready` is called once, when all of them serve.
        """
        signals = catch_signals(signal.SIGTERM, signal.SIGINT)
        self._poller.register(signals, select.POLLIN)
        has_been_ready = False
        try:
            while not self._has_drained:
                self._start_due()
                ready = {fd for fd, _ in self._poller.poll(self._timeout_ms())}
                if signals.fileno() in ready:
                    signals.recv(64)
                    self._drain()
                for process in self._processes.copy():
                    self._follow(process, ready)
                if not has_been_ready and self._is_ready:
                    has_been_ready = True
                    on_ready()
            return EXIT_OK
        finally:
            for process in self._processes:
                process.stop(_STOP_GRACE_S)

    @property
    def _is_ready(self) -> bool:
        return not self._start_times and all(process.serves for process in self._processes)

    @property
    def _has_drained(self) -> bool:
        if self._ends_at is None:
            return False
        return not self._processes or time.monotonic() >= self._ends_at

    def _timeout_ms(self) -> int | None:
        times = [*self._start_times, *(process.next_check_at for process in self._processes), self._ends_at]
        return min((until_ms(at) for at in times if at is not None), default=None)

    def _start_due(self) -> None:
        now = time.monotonic()
        for _ in [at for at in self._start_times if at <= now]:
            process = HttpProcess(self._attach, self._options, self._listening_socket)
            self._processes.append(process)
            self._poller.register(process.child.pid_fd, select.POLLIN)
            self._poller.register(process.control, select.POLLIN)
        self._start_times = [at for at in self._start_times if at > now]

    def _follow(self, process: HttpProcess, ready: set[int]) -> None:
        if process.control.fileno() in ready and not process.hear():
            self._poller.unregister(process.control)
        process.look()
        if process.child.pid_fd in ready:
            self._forget(process)
            if self._ends_at is None:
                self._replace(process.child)

    def _forget(self, process: HttpProcess) -> None:
        self._processes.remove(process)
        self._poller.unregister(process.child.pid_fd)
        with contextlib.suppress(KeyError):  # it was taken out at its last word
            self._poller.unregister(process.control)
        process.stop(0.0)

    def _replace(self, child: ChildProcess) -> None:
        """Have another started in place of one that was lost."""
        reason = child.describe_exit()
        if child.exit_code == EXIT_ENGINE_LOST:
            raise EngineDeadError(f"the engine {self._attach!r} has ended")
        backoff_s = self._budget.note_loss(time.monotonic())
        if backoff_s is None:
            raise EngineDeadError(f"{reason}, {self._budget.excess}")
        _logger.error("%s; starting another", reason)
        self._start_times.append(time.monotonic() + backoff_s)

    def _drain(self) -> None:
        """Hand a signal on, the first and each further one; the first begins the drain time."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + self._options.drain_timeout_s + _STOP_GRACE_S
            self._start_times = []
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.child.send_signal(signal.SIGTERM)
