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

from ..ipc.codec import PING, make_client_codec
from ..ipc.core_losses import CoreLosses
from ..ipc.daemon_state import (
    CLIENT_SOCKET_NAME,
    JOURNAL_NAME,
    SUPERVISOR_ROLE,
    WORKER_SOCKET_NAME,
    DaemonState,
    FailedReport,
    PhaseReport,
    ReadyReport,
    SupervisorLaunch,
    SupervisorReport,
    encode_state,
    write_state,
)
from ..ipc.errors import USER_ERRORS, EngineStartError, ProtocolError, QuireError
from ..ipc.launch import CORE_MODULE, CoreLaunch
from ..ipc.liveness import ChildWatch
from ..ipc.messages import (
    PROTOCOL_VERSION,
    EngineDead,
    Goodbye,
    Hello,
    Refusal,
    StartupProgress,
    Welcome,
)
from ..ipc.process import EXIT_CORE_LOST, EXIT_OK, EXIT_START_FAILED, ChildProcess, Lifeline, catch_signals
from ..ipc.process_limits import raise_file_limit
from ..ipc.run_dir import RunDirectory
from ..ipc.sockets import connect_dealer, until_ms

_log = logging.getLogger(__name__)

STOP_GRACE_S = 1.5
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
    """A core process and the conversation with it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], launch: CoreLaunch) -> None:
        self.child = ChildProcess.start(CORE_MODULE, "engine-core", msgspec.msgpack.encode(launch))
        self.socket = connect_dealer(context.socket(zmq.DEALER), launch.client_address)
        self._codec = make_client_codec()
        self._has_said_hello = False
        self._watch = ChildWatch(self.child, time.monotonic()) if launch.config.watches_core else None

    @property
    def next_check_at(self) -> float | None:
        """When `check_silence` has something to do, None if never. Monotonic."""
        return None if self._watch is None else self._watch.next_check_at

    def check_silence(self) -> None:
        """Ask a core that has said nothing for a while; kill one that does not answer, or never listened.

        An idle daemon does so 1.4 times a second, which takes 0.05 % of a core in each of the two processes.
        """
        now = time.monotonic()
        if self._watch is None:
            return
        self._watch.check_listening(now)
        if self._watch.look(now):
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart(PING, zmq.NOBLOCK)

    @property
    def must_say_hello(self) -> bool:
        """True until the core listens."""
        return not self._has_said_hello

    def say_hello(self) -> None:
        """Say it if the core listens by now."""
        with contextlib.suppress(zmq.Again):
            hello = Hello(PROTOCOL_VERSION, SUPERVISOR_ROLE, os.getpid())
            self.socket.send_multipart(self._codec.encode(hello), zmq.NOBLOCK)
            self._has_said_hello = True
            if self._watch is not None:
                self._watch.note_listening()
                self._watch.start(time.monotonic())

    def receive(self) -> msgspec.Struct | None:
        """The next message that has arrived and decodes, None if there is none."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
                if self._watch is not None:
                    self._watch.note_heard(time.monotonic())
                return self._codec.decode(frames)
            except zmq.Again:
                return None
            except ProtocolError as error:
                _log.warning("from the engine core: %s", error)

    def say_goodbye(self) -> None:
        """Answer a refusal, so that the core need not wait."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart(self._codec.encode(Goodbye()), zmq.NOBLOCK)

    def stop(self) -> None:
        """End the core and its worker."""
        self.child.stop(STOP_GRACE_S)
        self.socket.close(linger=0)


class Supervisor:
    """Keeps one engine core running until it is told to end."""

    def __init__(
        self,
        launch: SupervisorLaunch,
        run_dir: RunDirectory,
        reporter: Reporter,
        signals: socket.socket,
        lifeline_fd: int | None,
    ) -> None:
        self._launch = launch
        self._reporter = reporter
        self._run_dir = run_dir
        self._core_launch = CoreLaunch(
            client_address=run_dir.address_of(CLIENT_SOCKET_NAME),
            worker_address=run_dir.address_of(WORKER_SOCKET_NAME),
            config=launch.config,
            journal_path=str(run_dir.path / JOURNAL_NAME),
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._losses = CoreLosses(launch.config.recovery.make_core_budget(), self._core_launch.journal_path)
        self._core: CoreLink | None = None
        self._start_at: float | None = time.monotonic()  # when the next core is started
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
            name=launch.name,
            model=launch.config.model.served_model_name,
            pid=os.getpid(),
            started_at=time.time(),
            fault_hooks=launch.config.fault_hooks,
        )

    def run(self) -> int:
        """Supervise; returns the exit code. Every way out ends the core and removes the run directory."""
        try:
            while self._exit_code is None:
                self._turn()
        finally:
            if self._core is not None:
                self._core.stop()
            self._context.destroy(linger=0)
            self._run_dir.remove()
        return self._exit_code

    def _turn(self) -> None:
        # 1. Start a core when it is time.
        if self._core is None and self._start_at is not None and time.monotonic() >= self._start_at:
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
            mark.answer(encode_state(self._state))
        self._maintain_run_dir()
        if self._core is not None:
            self._follow_core(self._core, ready)

    def _timeout_ms(self) -> int | None:
        if self._core is not None and self._core.must_say_hello:
            return _HELLO_RETRY_MS
        wake_at = self._start_at if self._core is None else self._core.next_check_at
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
        launch = self._core_launch
        self._core = CoreLink(self._context, launch)
        self._core_launch = msgspec.structs.replace(launch, config=launch.config.for_replacement())
        self._poller.register(self._core.socket, zmq.POLLIN)
        self._poller.register(self._core.child.pid_fd, zmq.POLLIN)
        self._state.core_pid = self._core.child.pid
        self._write_state()

    def _follow_core(self, core: CoreLink, ready: dict[object, int]) -> None:
        if core.must_say_hello:
            core.say_hello()
        while (message := core.receive()) is not None:
            self._on_message(core, message)
        core.check_silence()
        if core.child.pid_fd in ready:
            self._on_core_lost(core)

    def _on_message(self, core: CoreLink, message: msgspec.Struct) -> None:
        match message:
            case StartupProgress(phase=phase):
                self._reporter.report(PhaseReport(phase))
            case Welcome():
                self._has_been_ready = True
                self._state.state = "ready"
                self._write_state()
                self._reporter.report(ReadyReport())
            case Refusal(reason=reason, kind=kind):
                # After a good start only what is wrong with the model or its options is final.
                if not self._has_been_ready or kind in USER_ERRORS:
                    self._final_words = FailedReport(reason, kind)
                core.say_goodbye()
            case EngineDead(reason=reason):
                self._final_words = FailedReport(reason)
                core.say_goodbye()
            case _:
                pass

    def _on_core_lost(self, core: CoreLink) -> None:
        reason = core.child.describe_exit()
        self._forget_core(core)
        if self._final_words is not None:  # what cannot go on now cannot in a second either
            self._fail(self._final_words, EXIT_START_FAILED)
            return
        backoff_s = self._losses.note_loss(time.monotonic())
        if backoff_s is None:
            self._fail(FailedReport(f"{reason}, {self._losses.excess}"), EXIT_CORE_LOST)
            return
        _log.error("%s; starting another", reason)
        self._state.last_loss = reason
        self._restart_after(backoff_s)

    def _restart_after(self, backoff_s: float) -> None:
        self._start_at = time.monotonic() + backoff_s
        self._state.num_restarts += 1
        self._state.state = "restarting"
        self._write_state()

    def _forget_core(self, core: CoreLink) -> None:
        self._poller.unregister(core.socket)
        self._poller.unregister(core.child.pid_fd)
        core.stop()
        self._core = None
        self._state.core_pid = None

    # The end.

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._end(EXIT_OK)
        elif signal.SIGHUP in numbers:
            _log.info("restarting the engine core")
            if self._core is not None:
                self._forget_core(self._core)
            self._restart_after(0.0)

    def _end(self, code: int) -> None:
        self._exit_code = code
        self._start_at = None
        self._state.state = "stopping"
        self._write_state()

    def _fail(self, report: FailedReport, code: int) -> None:
        """End with one line that says why, which is the last of the log."""
        self._reporter.report(report)
        self._end(code)
        _log.error("the daemon %r has failed: %s", self._launch.name, report.reason)

    def _write_state(self) -> None:
        try:
            write_state(self._run_dir.path, self._state)
        except OSError as error:  # a full disk must not end the daemon
            _log.warning("daemon state not written: %s", error)


def run_supervisor() -> NoReturn:
    """Entry point of `python -m quire.core supervisor`."""
    lifeline = Lifeline()
    raise_file_limit()
    launch = msgspec.msgpack.decode(lifeline.launch, type=SupervisorLaunch)
    logging.basicConfig(level=launch.config.log_level, format="quire: %(message)s")
    reporter = Reporter()
    # Before the directory is made: a signal from now on ends in the way that removes it.
    signals = catch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        run_dir = RunDirectory.create_named(launch.name)
    except QuireError as error:
        reporter.report(FailedReport(str(error), type(error).__name__))
        sys.exit(EXIT_START_FAILED)
    lifeline_fd = lifeline.fd if launch.ends_with_parent else None
    sys.exit(Supervisor(launch, run_dir, reporter, signals, lifeline_fd).run())
