"""The supervisor of a daemon: owns its run directory and its engine core; starts another if one is lost.

It is a client of its own core too, which is how it knows that the core is ready, or why it refuses to start.
One thread that blocks in poll; loads neither the core's code nor torch. Signals: SIGTERM and SIGINT end the
daemon, SIGHUP restarts the core while its clients wait and then go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from typing import NoReturn

import msgspec
import zmq

from ..ipc.client_protocol import ClientProtocol
from ..ipc.daemon.daemon_state import (
    SUPERVISOR_ROLE,
    DaemonState,
    FailedReport,
    PhaseReport,
    ReadyReport,
    SupervisorArgs,
    SupervisorReport,
    write_state,
)
from ..ipc.daemon.run_dir import RunDirectory
from ..ipc.due import until_ms
from ..ipc.errors import USER_ERRORS, EngineStartError, ProtocolError, QuireError
from ..ipc.processes.child_args import CORE_MODULE
from ..ipc.processes.core_child import STOP_GRACE_S, CoreChild
from ..ipc.processes.process import EXIT_CORE_LOST, EXIT_OK, EXIT_START_FAILED, Lifeline, catch_signals
from ..ipc.processes.process_limits import raise_file_limit
from ..ipc.sockets import connect_dealer

_log = logging.getLogger(__name__)

MAINTENANCE_INTERVAL_S = 0.6  # less than the silence after which an idle core is asked: no wake of its own
_HELLO_RETRY_MS = 20


class Reporter:
    """Tells whoever started this daemon how the start goes, through what was standard output.

    Children must not inherit that: its end-of-file says that this process has ended.
    """

    def __init__(self) -> None:
        self._fd: int | None = os.dup(1)
        os.dup2(2, 1)

    def report(self, report: SupervisorReport) -> None:
        """Say it, if somebody still listens. Nothing is said after the start."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        if isinstance(report, ReadyReport):
            os.close(self._fd)
            self._fd = None


class CoreLink:
    """The supervisor's driver of ClientProtocol, with one core process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], core: CoreChild) -> None:
        self.socket = connect_dealer(context.socket(zmq.DEALER), core.address)
        self.protocol = ClientProtocol(SUPERVISOR_ROLE)
        self.has_connected = False
        self._watch = core.watch if core.is_watched else None
        self.protocol.engine_started(self._watch)

    def connect(self, now: float) -> None:
        """Say Hello if the core listens by now. It is watched while it starts, too.

        An idle core is asked 1.4 times a second, which takes 0.05 % of a core in each of the two processes.
        """
        if self.socket.poll(0, zmq.POLLOUT):
            self.has_connected = True
            self.protocol.connection_made(now)
            if self._watch is not None:
                self._watch.start(now)

    def receive(self, now: float) -> bool:
        """Take the next message in, False if there is none. Raises what it stands for."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.protocol.note_heard(now)
        self.protocol.frames_received(frames, now)
        return True

    def send_waiting(self) -> None:
        """Send what waits to be sent, as far as the core takes it."""
        outbox = self.protocol.outbox
        with contextlib.suppress(zmq.ZMQError):
            while outbox:
                self.socket.send_multipart(outbox[0], zmq.NOBLOCK)
                outbox.popleft()


class Supervisor:
    """Keeps one engine core running until it is told to end."""

    def __init__(
        self,
        args: SupervisorArgs,
        run_dir: RunDirectory,
        reporter: Reporter,
        signals: socket.socket,
        lifeline_fd: int | None,
    ) -> None:
        self._args = args
        self._reporter = reporter
        self._run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._core = CoreChild(run_dir, args.config, CORE_MODULE)
        self._core.start_at = time.monotonic()
        self._link: CoreLink | None = None  # while there is a core
        self._has_been_ready = False
        self._final_words: FailedReport | None = None  # why the core will not run again
        self._exit_code: int | None = None
        self._signals = signals
        self._poller = zmq.Poller()
        self._poller.register(self._signals.fileno(), zmq.POLLIN)
        if run_dir.mark is not None:
            self._poller.register(run_dir.mark.fileno(), zmq.POLLIN)
        self._maintain_at = time.monotonic() + MAINTENANCE_INTERVAL_S
        self._lifeline_fd = lifeline_fd
        if lifeline_fd is not None:
            self._poller.register(lifeline_fd, zmq.POLLIN)
        self._state = DaemonState(
            name=args.name,
            model=args.config.model.served_model_name,
            pid=os.getpid(),
            started_at=time.time(),
            fault_hooks=args.config.fault_hooks,
        )

    def run(self) -> int:
        """Supervise; returns the exit code. Every way out ends the core and removes the run directory."""
        try:
            while self._exit_code is None:
                self._turn()
        finally:
            self._core.stop(STOP_GRACE_S)
            self._context.destroy(linger=0)
            self._run_dir.remove()
        return self._exit_code

    def _turn(self) -> None:
        # 1. Start a core when it is time.
        if self._core.is_due(time.monotonic()):
            self._start_core()
        # 2. Wait until something arrives.
        ready = dict(self._poller.poll(self._timeout_ms()))
        # 3. Take it.
        if self._lifeline_fd in ready:
            self._end(EXIT_OK)
            return
        if self._signals.fileno() in ready:
            self._on_signals(self._signals.recv(64))
        mark = self._run_dir.mark
        if mark is not None and mark.fileno() in ready:
            mark.answer(msgspec.json.encode(self._state))
        self._maintain_run_dir()
        if self._link is not None:
            self._follow_core(self._link, ready)

    def _timeout_ms(self) -> int | None:
        if self._link is not None and not self._link.has_connected:
            return _HELLO_RETRY_MS
        wake_at = self._core.next_check_at
        return until_ms(self._maintain_at if wake_at is None else wake_at)

    def _maintain_run_dir(self) -> None:
        """Put back what a cleaner has taken; the core does so with its socket. End if the name is lost."""
        if time.monotonic() < self._maintain_at:
            return
        self._maintain_at = time.monotonic() + MAINTENANCE_INTERVAL_S
        try:
            if self._run_dir.maintain():
                _log.warning("%s, or a file in it, was removed; it is made again", self._run_dir.path)
                self._write_state()
        except EngineStartError as error:  # a full disk, for one: tried again
            _log.error("%s", error)
        except QuireError as error:
            self._fail(FailedReport(str(error), type(error).__name__), EXIT_CORE_LOST)

    # The core.

    def _start_core(self) -> None:
        self._core.start()
        process = self._core.process
        assert process is not None
        self._link = CoreLink(self._context, self._core)
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(process.pid_fd, zmq.POLLIN)
        self._state.core_pid = process.pid
        self._write_state()

    def _follow_core(self, link: CoreLink, ready: dict[object, int]) -> None:
        now = time.monotonic()
        if not link.has_connected:
            link.connect(now)
        while self._receive(link, now):
            pass
        link.protocol.time_passed(now)
        link.send_waiting()
        if self._core.process is not None and self._core.process.pid_fd in ready:
            self._on_core_lost()

    def _receive(self, link: CoreLink, now: float) -> bool:
        """Take one message, False if there is none."""
        protocol = link.protocol
        phase = protocol.phase
        try:
            if not link.receive(now):
                return False
        except ProtocolError as error:
            _log.warning("from the engine core: %s", error)
        except QuireError as error:
            self._note_refusal(protocol, error)
        if protocol.phase is not None and protocol.phase != phase:
            self._reporter.report(PhaseReport(protocol.phase))
        if protocol.is_open and self._state.state not in ("ready", "stopping"):
            self._note_ready()
        return True

    def _note_ready(self) -> None:
        self._has_been_ready = True
        self._state.state = "ready"
        self._write_state()
        self._reporter.report(ReadyReport())

    def _note_refusal(self, protocol: ClientProtocol, error: QuireError) -> None:
        """After a good start only what cannot change is final: the model, its options, last words."""
        kind = type(error).__name__
        if not self._has_been_ready or kind in USER_ERRORS or protocol.end_reason is not None:
            self._final_words = FailedReport(str(error), kind)

    def _on_core_lost(self) -> None:
        reason = self._forget_core()
        if self._final_words is not None:  # what cannot go on now cannot in a second either
            self._fail(self._final_words, EXIT_START_FAILED)
        elif self._core.replace(reason, time.monotonic()):
            self._state.last_loss = reason
            self._note_restart()
        else:
            self._fail(FailedReport(self._core.end_reason or reason), EXIT_CORE_LOST)

    def _note_restart(self) -> None:
        self._state.num_restarts += 1
        self._state.state = "restarting"
        self._write_state()

    def _forget_core(self) -> str:
        """End the core and its worker, if there are any; returns how it has ended."""
        link, self._link = self._link, None
        if link is None or self._core.process is None:
            return ""
        self._poller.unregister(link.socket)
        self._poller.unregister(self._core.process.pid_fd)
        self._state.core_pid = None
        reason = self._core.stop(STOP_GRACE_S)
        link.socket.close(linger=0)
        return reason

    # The end.

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._end(EXIT_OK)
        elif signal.SIGHUP in numbers:
            _log.info("restarting the engine core")
            self._forget_core()
            self._core.start_at = time.monotonic()
            self._note_restart()

    def _end(self, code: int) -> None:
        self._exit_code = code
        self._core.start_at = None
        self._state.state = "stopping"
        self._write_state()

    def _fail(self, report: FailedReport, code: int) -> None:
        """End with one line that says why, which is the last of the log."""
        self._reporter.report(report)
        self._end(code)
        _log.error("the daemon %r has failed: %s", self._args.name, report.reason)

    def _write_state(self) -> None:
        try:
            write_state(self._run_dir.path, self._state)
        except OSError as error:  # a full disk must not end the daemon
            _log.warning("daemon state not written: %s", error)


def run_supervisor() -> NoReturn:
    """Entry point of `python -m quire.core supervisor`."""
    lifeline = Lifeline()
    raise_file_limit()
    args = msgspec.msgpack.decode(lifeline.args, type=SupervisorArgs)
    logging.basicConfig(level=args.config.log_level, format="quire: %(message)s")
    reporter = Reporter()
    # Before the directory is made: a signal from now on ends in the way that removes it.
    signals = catch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        run_dir = RunDirectory.create_named(args.name)
    except QuireError as error:
        reporter.report(FailedReport(str(error), type(error).__name__))
        sys.exit(EXIT_START_FAILED)
    lifeline_fd = lifeline.fd if args.ends_with_parent else None
    sys.exit(Supervisor(args, run_dir, reporter, signals, lifeline_fd).run())
