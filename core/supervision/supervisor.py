"""The supervisor of a daemon: owns its run directory and its engine cores, and replaces a core that is lost.

It is also a client of its cores, and so knows when one is ready, or why it refuses to start. One thread,
which blocks in poll; it loads neither the core's code nor torch. SIGTERM and SIGINT end the daemon, SIGHUP
restarts its cores one after the other, while their clients wait.
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

from ...ipc.daemon.daemon_control import ControlSocket, RestartEngines
from ...ipc.daemon.daemon_state import (
    DaemonPhase,
    DaemonState,
    FailedReport,
    PhaseReport,
    ReadyReport,
    SupervisorArgs,
    SupervisorReport,
    note_failure,
    write_state,
)
from ...ipc.daemon.run_dir import RunDirectory
from ...ipc.decoding import decode_msgpack
from ...ipc.errors import EngineStartError, FilesChangedError, QuireError
from ...ipc.processes.child_args import CORE_MODULE
from ...ipc.processes.due import until_ms
from ...ipc.processes.log_lines import start_logging
from ...ipc.processes.process import EXIT_CORE_LOST, EXIT_OK, EXIT_START_FAILED, Lifeline, catch_signals
from ...ipc.processes.process_limits import raise_file_limit
from .group_commands import GroupCommands
from .network_ports import NetworkPorts
from .supervised_group import SupervisedGroup


class Reporter:
    """Tells the process that starts a daemon how the start goes: a line of standard output a report.

    Children must not inherit this output: its end-of-file says that this process has ended.
    """

    def __init__(self) -> None:
        self._fd: int | None = os.dup(1)
        os.dup2(2, 1)

    def report(self, report: SupervisorReport) -> None:
        """Write a report, if it is still read. Nothing is written after the start."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        if isinstance(report, ReadyReport):
            os.close(self._fd)
            self._fd = None


_log = logging.getLogger(__name__)

MAINTENANCE_INTERVAL_S = 0.6  # less than ASK_AFTER_S of liveness.py, so that it costs no wake-up of its own


class Supervisor:
    """Keeps its engines running until it is stopped, or none is left."""

    def __init__(
        self,
        args: SupervisorArgs,
        run_dir: RunDirectory,
        reporter: Reporter,
        signals: socket.socket,
        lifeline_fd: int,
        ports: NetworkPorts | None = None,
    ) -> None:
        """`ports`: for clients of other machines."""
        self._args = args
        self._reporter = reporter
        self._run_dir = run_dir
        self._ports = ports
        self._has_been_ready = False
        self._exit_code: int | None = None
        self._signals = signals
        self._poller = zmq.Poller()
        self._poller.register(self._signals.fileno(), zmq.POLLIN)
        if run_dir.mark is not None:
            self._poller.register(run_dir.mark.fileno(), zmq.POLLIN)
        self._maintain_at = time.monotonic() + MAINTENANCE_INTERVAL_S
        self._lifeline_fd = lifeline_fd
        self._poller.register(lifeline_fd, zmq.POLLIN)
        self._control = ControlSocket(run_dir.path)
        self._group = SupervisedGroup(
            run_dir,
            args.config,
            CORE_MODULE,
            self._poller,
            lambda phase: reporter.report(PhaseReport(phase)),
            ports,
        )
        self._commands = GroupCommands(self._group, self._control.answer)
        self._lost: set[int] = set()  # engines whose loss has been logged
        self._state = DaemonState(
            name=args.name,
            model=args.config.model.served_model_name,
            pid=os.getpid(),
            started_at=time.time(),
            fault_hooks=args.config.fault_hooks,
            listen="" if ports is None else str(ports.address),
        )
        self._written_state = b""  # as it was written last

    def run(self) -> int:
        """Supervise; returns the exit code. Every way out ends the cores and removes the run directory."""
        try:
            self._bind_control()
            while self._exit_code is None:
                self._turn()
        finally:
            self._group.stop()
            if self._ports is not None:
                self._ports.close()
            self._control.close()
            self._run_dir.remove()
        return self._exit_code

    def _turn(self) -> None:
        # 1. Start cores that are due.
        if self._group.start_due(time.monotonic()):
            self._update_state()
        # 2. Wait until something arrives.
        ready = dict(self._poller.poll(self._timeout_ms()))
        # 3. Take it.
        if self._lifeline_fd in ready and not self._is_let_go():
            self._end(EXIT_OK)
            return
        if self._signals.fileno() in ready:
            self._on_signals(self._signals.recv(64))
        mark = self._run_dir.mark
        if mark is not None and mark.fileno() in ready:
            mark.answer(msgspec.json.encode(self._state))
        if self._control.fileno() in ready:
            for sender, command in self._control.receive():
                self._commands.start(sender, command)
        self._maintain_run_dir()
        if self._exit_code is not None:
            return
        # 4. Follow the engines, and tell everybody what has changed.
        self._group.follow(ready, time.monotonic())
        self._commands.advance()
        self._check_engines()
        self._group.tell_roster()
        self._update_state()

    def _is_let_go(self) -> bool:
        """Whether the process that started it has detached it; else that process has ended."""
        if not os.read(self._lifeline_fd, 1):
            return False
        self._poller.unregister(self._lifeline_fd)
        return True

    def _timeout_ms(self) -> int | None:
        wake_at = self._group.next_check_at
        return until_ms(self._maintain_at if wake_at is None else wake_at)

    def _bind_control(self) -> None:
        """Bind the control socket, if its file is missing."""
        before = self._control.fileno()
        try:
            if self._control.maintain():
                with contextlib.suppress(KeyError):
                    self._poller.unregister(before)
                self._poller.register(self._control.fileno(), zmq.POLLIN)
        except OSError as error:  # a full disk, for one: tried again
            _log.error("commands cannot come: %s", error)

    def _maintain_run_dir(self) -> None:
        """Restore what a cleaner has removed, as cores do with their sockets. End if the name is lost."""
        if time.monotonic() < self._maintain_at:
            return
        self._maintain_at = time.monotonic() + MAINTENANCE_INTERVAL_S
        try:
            if self._run_dir.maintain():
                _log.warning("%s, or a file in it, was removed; it is made again", self._run_dir.path)
                self._written_state = b""
            self._bind_control()
        except EngineStartError as error:  # a full disk, for one: tried again
            _log.error("%s", error)
        except QuireError as error:
            self._fail(FailedReport(str(error), type(error).__name__), EXIT_CORE_LOST)

    def _check_engines(self) -> None:
        """End the daemon for a failed engine if it was never ready, or no other engine is left."""
        group = self._group
        for index, engine in group.engines.items():
            if engine.failure is None:
                self._lost.discard(index)
            elif not self._has_been_ready or not group.running:
                self._fail(engine.failure.report, engine.failure.exit_code)
                return
            elif index not in self._lost:
                self._lost.add(index)
                left = ", ".join(str(other.state.index) for other in group.running)
                _log.error("engine %d is lost: %s; left: %s", index, engine.failure.report.reason, left)
        if not self._has_been_ready and all(engine.is_open for engine in group.engines.values()):
            self._has_been_ready = True
            self._update_state()  # before the report, whose reader may look at the state
            self._reporter.report(ReadyReport())

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._end(EXIT_OK)
        elif signal.SIGHUP in numbers:
            self._restart()

    def _restart(self) -> None:
        """Restart a single engine at once, several one after the other."""
        if len(self._group.engines) > 1:
            self._commands.start("", RestartEngines())
            return
        _log.info("restarting the engine core")
        try:
            for engine in self._group.engines.values():
                self._group.restart(engine)
        except FilesChangedError as error:
            _log.error("it is not restarted: %s", error)

    def _end(self, code: int) -> None:
        self._exit_code = code
        self._update_state()
        self._group.begin_stop()

    def _fail(self, report: FailedReport, code: int) -> None:
        """End the daemon. The log's last line says why."""
        self._reporter.report(report)
        self._end(code)
        if self._has_been_ready and not self._args.ends_with_parent:
            note_failure(self._args.name, report.reason)
        _log.error("the daemon %r has failed: %s", self._args.name, report.reason)

    def _update_state(self) -> None:
        """Update the state, and write it if it has changed."""
        state, engines = self._state, self._group.states
        state.state = self._find_phase()
        state.engines = engines
        state.core_pid = next((engine.pid for engine in engines if engine.pid is not None), None)
        state.num_restarts = sum(engine.num_restarts for engine in engines)
        state.last_loss = self._group.last_loss
        encoded = msgspec.json.encode(state)
        if encoded == self._written_state:
            return
        self._written_state = encoded
        try:
            write_state(self._run_dir.path, state)
        except OSError as error:  # a full disk must not end the daemon
            _log.warning("daemon state not written: %s", error)

    def _find_phase(self) -> DaemonPhase:
        if self._exit_code is not None:
            return "stopping"
        engines = self._group.running
        if any(engine.is_open for engine in engines) and self._has_been_ready:
            return "ready"
        return "restarting" if any(engine.state.state == "restarting" for engine in engines) else "starting"


def run_supervisor() -> NoReturn:
    """Entry point of `python -m quire.core supervisor`."""
    lifeline = Lifeline()
    raise_file_limit()
    args = decode_msgpack(lifeline.args, SupervisorArgs)
    start_logging("quire", args.config.log_level, args.config.log_format)
    reporter = Reporter()
    # Before the directory is made: a signal from now on ends in the way that removes it.
    signals = catch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        ports = None
        if args.listen:
            ports = NetworkPorts(args.listen, args.keys, args.config.parallel.data_parallel_size)
        run_dir = RunDirectory.create_named(args.name)
    except QuireError as error:
        reporter.report(FailedReport(str(error), type(error).__name__))
        sys.exit(EXIT_START_FAILED)
    sys.exit(Supervisor(args, run_dir, reporter, signals, lifeline.fd, ports).run())
