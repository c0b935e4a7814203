"""Several HTTP processes on one listening socket over the same engines, and what keeps them running.

One that is lost is started again without the others: its connections end, and the engine drops its requests.
Each has a socket to this process, over which it says that it listens and serves, and answers when it is asked
after a silence: one that is stopped or hangs is killed, and then lost as one that died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from ...ipc.errors import EngineDeadError, EngineStartError, FilesChangedError
from ...ipc.processes.due import find_earliest, until_ms
from ...ipc.processes.managed_child import ManagedChild
from ...ipc.processes.process import EXIT_OK, ChildProcess, catch_signals
from ...ipc.processes.restarts import RestartBudget
from ..client.remote_daemon import Attachment
from .engines.daemon_model import DaemonModel
from .jobs.peers import PeerSockets, listen_for_peers
from .observe.http_counts import make_counts_memory
from .options import ServerOptions

_log = logging.getLogger(__name__)

HTTP_MODULE = "quire.frontend.http"
EXIT_ENGINE_LOST = 14  # of an HTTP process whose engine is gone for good
# What is said over an HTTP process's socket: single bytes, and lines that begin with one.
PING, ALIVE, SERVES, PHASE, FAILED = b"?", b".", b"!", b"%", b"#"
_SPEAK_TIMEOUT_S = 60.0  # from an HTTP process's start to its first word: a second's imports, if left alone
_STOP_GRACE_S = 5.0  # beyond the drain time


class HttpArgs(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP process: which daemon to attach to, or which several, and where to listen.

    control_fd: a socket on which it says ALIVE when its event loop begins and for every PING, and lines:
    PHASE as the engine starts, SERVES with how it reads tool calls and thoughts once it takes requests, or
    FAILED with the reason. peers: where the processes ask each other for stored responses.
    """

    attach: Attachment | tuple[DaemonModel, ...]
    options: ServerOptions
    listening_fd: int
    control_fd: int
    peers: PeerSockets | None = None


class HttpProcess:
    """The place of one HTTP process, which is watched from its first word on."""

    def __init__(
        self,
        attach: Attachment | tuple[DaemonModel, ...],
        options: ServerOptions,
        listening_socket: socket.socket,
        budget: RestartBudget,
        peers: PeerSockets,
    ) -> None:
        self.child = ManagedChild(self._start_process, budget)
        self.child.start_at = time.monotonic()
        self.control: socket.socket | None = None
        self.serves = False
        self.formats = ""  # how it reads tool calls and thoughts, once it serves
        self.phase = ""  # of the engine's start, as it said last
        self.failure = ""  # why the engine did not start
        self._heard = b""  # the beginning of a line
        self._attach = attach
        self._options = options
        self._listening_socket = listening_socket
        self._peers = peers

    def start(self, accepts_when_ready: bool) -> ChildProcess:
        """Start the process; its control socket is this one's `control`."""
        self._options = msgspec.structs.replace(self._options, accepts_when_ready=accepts_when_ready)
        now = time.monotonic()
        deadline = self.child.start().deadline
        deadline.set(now, _SPEAK_TIMEOUT_S, f"it did not start within {_SPEAK_TIMEOUT_S:g} s")
        assert self.child.process is not None
        return self.child.process

    def hear(self) -> bool:
        """Take what it has said; False when it has nothing more to say, because it ends."""
        received = b""
        if self.control is not None:
            with contextlib.suppress(OSError):
                received = self.control.recv(4096)
        watch, now = self.child.watch, time.monotonic()
        if not received or watch is None:
            return False
        if watch.deadline.due_at is not None:
            watch.note_listening()
            watch.start(now)
        watch.note_heard(now)
        *lines, self._heard = (self._heard + received).split(b"\n")
        self._heard = self._heard.lstrip(ALIVE)
        for line in lines:
            self._note(line.lstrip(ALIVE))
        return True

    def _note(self, line: bytes) -> None:
        text = line[1:].decode(errors="replace")
        match line[:1]:
            case b"!":
                self.serves, self.formats = True, text
            case b"%":
                self.phase = text
            case _:
                self.failure = text

    def look(self) -> None:
        """Ask it after a silence; kill it when it does not answer, or has not got as far as its loop."""
        must_ask = self.child.watch is not None and self.child.watch.look(time.monotonic())
        if must_ask and self.control is not None:
            with contextlib.suppress(OSError):
                self.control.send(PING)

    def stop(self, grace_s: float) -> str:
        """End it, with SIGKILL after `grace_s`; returns how it has ended. Idempotent."""
        reason = self.child.stop(grace_s)
        if self.control is not None:
            self.control.close()
        self.control, self.serves, self._heard = None, False, b""
        return reason

    def _start_process(self) -> ChildProcess:
        self.control, its_end = socket.socketpair()
        self.control.setblocking(False)
        with its_end:
            args = HttpArgs(
                attach=self._attach,
                options=self._options,
                listening_fd=self._listening_socket.fileno(),
                control_fd=its_end.fileno(),
                peers=self._peers,
            )
            peers = self._peers
            fds = (args.listening_fd, args.control_fd, peers.listening_fd)
            fds += () if peers.counts_fd is None else (peers.counts_fd,)
            return ChildProcess.start(HTTP_MODULE, "http", msgspec.msgpack.encode(args), pass_fds=fds)


class HttpGroup:
    """`num_processes` HTTP processes. `run` serves until SIGTERM or SIGINT, then drains them."""

    def __init__(
        self,
        attach: Attachment | tuple[DaemonModel, ...],
        options: ServerOptions,
        listening_socket: socket.socket,
        num_processes: int,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """`on_phase` is told the phases of the engine's start."""
        self._attach = attach
        self._drain_timeout_s = options.drain_timeout_s
        self._on_phase = on_phase
        self._has_been_ready = False
        budget = RestartBudget(options.max_http_restarts)  # of all of them
        self._listeners = [listen_for_peers() for _ in range(num_processes)]
        self._counts_fd = make_counts_memory(num_processes)
        names = [listener.getsockname() for listener in self._listeners]
        places = [
            PeerSockets(place, listener.fileno(), names, self._counts_fd)
            for place, listener in enumerate(self._listeners)
        ]
        self._processes = [
            HttpProcess(attach, options, listening_socket, budget, number) for number in places
        ]
        self._poller = select.poll()
        self._ends_at: float | None = None  # while it drains: when what is left is killed

    def run(self, on_ready: Callable[[], None]) -> int:
        """Returns 0. Raises EngineDeadError when the engine is gone, or the processes keep being lost.

        `on_ready` is called once, when all of them serve.
        """
        signals = catch_signals(signal.SIGTERM, signal.SIGINT)
        self._poller.register(signals, select.POLLIN)
        try:
            while not self._has_drained:
                self._start_due()
                ready = {fd for fd, _ in self._poller.poll(self._timeout_ms())}
                if signals.fileno() in ready:
                    signals.recv(64)
                    self._drain()
                for process in self._processes:
                    self._follow(process, ready)
                if not self._has_been_ready and all(process.serves for process in self._processes):
                    self._has_been_ready = True
                    on_ready()
            return EXIT_OK
        finally:
            for process in self._processes:
                process.stop(_STOP_GRACE_S)
            for listener in self._listeners:
                listener.close()
            os.close(self._counts_fd)

    @property
    def formats(self) -> str:
        """How tool calls and thoughts are read, once all serve."""
        return self._processes[0].formats

    @property
    def _has_drained(self) -> bool:
        if self._ends_at is None:
            return False
        is_empty = all(process.child.process is None for process in self._processes)
        return is_empty or time.monotonic() >= self._ends_at

    def _timeout_ms(self) -> int | None:
        at = find_earliest(*(process.child.next_check_at for process in self._processes), self._ends_at)
        return None if at is None else until_ms(at)

    def _start_due(self) -> None:
        for process in self._processes:
            if process.child.is_due(time.monotonic()):
                # At first there is nobody else who could say that the engine is being loaded.
                try:
                    child = process.start(self._has_been_ready)
                except FilesChangedError as error:
                    self._go_without(process, error)
                    continue
                self._poller.register(child.pid_fd, select.POLLIN)
                assert process.control is not None
                self._poller.register(process.control, select.POLLIN)

    def _go_without(self, process: HttpProcess, error: FilesChangedError) -> None:
        """The others serve on, without one of another version. Raises EngineDeadError if there are none."""
        process.stop(0.0)
        process.child.start_at = None
        if all(other.child.process is None and other.child.start_at is None for other in self._processes):
            raise EngineDeadError(f"no HTTP process is left, and no other is started: {error}") from None
        _log.error("a lost HTTP process is not replaced: %s", error)

    def _follow(self, process: HttpProcess, ready: set[int]) -> None:
        control, child = process.control, process.child.process
        if control is None or child is None:
            return
        phase = process.phase
        if control.fileno() in ready and not process.hear():
            self._poller.unregister(control)
        if self._on_phase is not None and process is self._processes[0] and process.phase != phase:
            self._on_phase(process.phase)
        process.look()
        if child.pid_fd in ready:
            self._poller.unregister(child.pid_fd)
            with contextlib.suppress(KeyError):  # it was taken out at its last word
                self._poller.unregister(control)
            reason = process.stop(0.0)
            if self._ends_at is None:
                self._replace(process, reason, child.exit_code)

    def _replace(self, process: HttpProcess, reason: str, exit_code: int | None) -> None:
        """Have another started in place of one that was lost."""
        if process.failure and not self._has_been_ready:
            raise EngineStartError(process.failure)
        child = process.child
        if exit_code == EXIT_ENGINE_LOST:
            raise EngineDeadError(f"the engine {self._attach!r} has ended")
        if not child.replace(reason, time.monotonic()):
            raise EngineDeadError(child.end_reason)

    def _drain(self) -> None:
        """Hand a signal on, the first and each further one; the first begins the drain time."""
        if self._ends_at is None:
            self._ends_at = time.monotonic() + self._drain_timeout_s + _STOP_GRACE_S
        for process in self._processes:
            process.child.start_at = None
            if process.child.process is not None:
                process.child.process.send_signal(signal.SIGTERM)
