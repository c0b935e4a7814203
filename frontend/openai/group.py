"""Several HTTP processes on one listening socket over one engine, and the process that keeps them running.

One that is lost is started again without the others: its connections end, and the engine drops its requests.
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

from ...ipc.errors import EngineDeadError
from ...ipc.process import EXIT_OK, ChildProcess, catch_signals
from ...ipc.restarts import LOSS_WINDOW_S, MAX_LOSSES, RestartBudget
from .options import ServerOptions

HTTP_MODULE = "quire.frontend.openai"
EXIT_ENGINE_LOST = 14  # of an HTTP process whose engine is gone for good
_STOP_GRACE_S = 5.0  # beyond the drain time
_logger = logging.getLogger("quire.serve")


class HttpLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP process: which daemon to attach to, where to listen, how to say that it is ready."""

    attach: str
    options: ServerOptions
    listening_fd: int
    ready_fd: int  # gets a byte when it serves


class HttpGroup:
    """`num_processes` HTTP processes. `run` serves until SIGTERM or SIGINT, then drains them."""

    def __init__(
        self, attach: str, options: ServerOptions, listening_socket: socket.socket, num_processes: int
    ) -> None:
        self._attach = attach
        self._options = msgspec.structs.replace(options, accepts_when_ready=True)
        self._listening_socket = listening_socket
        self._num_processes = num_processes
        self._children: list[ChildProcess] = []
        self._budget = RestartBudget()
        self._poller = select.poll()
        self._ready_reader, self._ready_writer = os.pipe()
        self._num_ready = 0

    def run(self, on_ready: Callable[[], None]) -> int:
        """Returns 0. Raises EngineDeadError when the engine is gone, or the processes keep being lost."""
        signals = catch_signals(signal.SIGTERM, signal.SIGINT)
        self._poller.register(signals, select.POLLIN)
        self._poller.register(self._ready_reader, select.POLLIN)
        try:
            for _ in range(self._num_processes):
                self._start_one()
            while True:
                ready = {fd for fd, _ in self._poller.poll()}
                if self._ready_reader in ready:
                    self._note_ready(on_ready)
                if signals.fileno() in ready:
                    signals.recv(64)
                    self._drain(signals)
                    return EXIT_OK
                for child in [child for child in self._children if child.pid_fd in ready]:
                    self._replace(child)
        finally:
            for child in self._children:
                child.stop(_STOP_GRACE_S)
            os.close(self._ready_reader)
            os.close(self._ready_writer)

    def _start_one(self) -> None:
        launch = HttpLaunch(
            attach=self._attach,
            options=self._options,
            listening_fd=self._listening_socket.fileno(),
            ready_fd=self._ready_writer,
        )
        fds = (launch.listening_fd, launch.ready_fd)
        child = ChildProcess.start(HTTP_MODULE, "http", msgspec.msgpack.encode(launch), pass_fds=fds)
        self._children.append(child)
        self._poller.register(child.pid_fd, select.POLLIN)

    def _note_ready(self, on_ready: Callable[[], None]) -> None:
        was_ready = self._num_ready >= self._num_processes
        self._num_ready += len(os.read(self._ready_reader, 64))
        if self._num_ready >= self._num_processes and not was_ready:
            on_ready()

    def _replace(self, child: ChildProcess) -> None:
        """Start another in place of one that was lost."""
        reason = child.describe_exit()
        self._forget(child)
        if child.exit_code == EXIT_ENGINE_LOST:
            raise EngineDeadError(f"the engine {self._attach!r} has ended")
        backoff_s = self._budget.note_loss(time.monotonic())
        if backoff_s is None:
            raise EngineDeadError(f"{reason}, {MAX_LOSSES + 1} times in {LOSS_WINDOW_S:g} s")
        _logger.error("%s; starting another", reason)
        time.sleep(backoff_s)
        self._start_one()

    def _forget(self, child: ChildProcess) -> None:
        self._children.remove(child)
        self._poller.unregister(child.pid_fd)
        child.stop(0.0)

    def _drain(self, signals: socket.socket) -> None:
        """Hand the signal on, and each further one, until every process has ended or the time is over."""
        self._signal_all()
        deadline = time.monotonic() + self._options.drain_timeout_s + _STOP_GRACE_S
        while self._children and (left_s := deadline - time.monotonic()) > 0:
            ready = {fd for fd, _ in self._poller.poll(1000 * left_s)}
            if self._ready_reader in ready:
                os.read(self._ready_reader, 64)
            if signals.fileno() in ready:
                signals.recv(64)
                self._signal_all()
            for child in [child for child in self._children if child.pid_fd in ready]:
                self._forget(child)

    def _signal_all(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
