"""The engines that a client talks to: a private one that it owns, or a daemon's. Knows no message."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ...ipc.config import EngineConfig
from ...ipc.daemon.daemon_state import CLIENT_SOCKET_NAME
from ...ipc.daemon.run_dir import RunDirectory, find_daemon, find_named
from ...ipc.errors import DaemonError, EngineDeadError, QuireError
from ...ipc.messages import EngineFacts
from ...ipc.processes.child_args import CORE_MODULE
from ...ipc.processes.core_child import STOP_GRACE_S, CoreChild
from ...ipc.processes.liveness import ChildWatch
from ...ipc.processes.process import EXIT_OK, EXIT_WORKER_LOST, ChildProcess, wait_readable
from ...ipc.sockets import make_ipc_address

LAST_WORDS_MS = 100

# Another core would end in the same way, or was told to end.
_FINAL_EXIT_CODES = (EXIT_OK, EXIT_WORKER_LOST)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedRestart:
    """`start()`, to be called `after_s` from now, puts another engine in the place of one that has ended, at
    the same address with another `exit_fd`.
    """

    after_s: float
    start: Callable[[], None]


class Engine(ABC):
    """An engine that a client talks to. `exit_fd` becomes readable when it is gone for good."""

    address: str
    exit_fd: int
    started_at: float  # wall clock, when this client asked for it
    linger_ms: int  # how long what was sent last may take to leave
    watch: ChildWatch | None = None  # of an engine that this client may kill

    @abstractmethod
    def check_owner(self) -> None:
        """Raise EngineDeadError in a fork of the owner: two processes cannot share one connection."""

    @abstractmethod
    def describe_end(self) -> str | None:
        """How it has ended, None while it lives."""

    @property
    def last_words_ms(self) -> int:
        """It has ended: how long what it said last may be on its way through the socket."""
        return LAST_WORDS_MS

    def plan_restart(self) -> PlannedRestart | None:
        """It has ended: how this client starts another, None if it is gone for good."""
        return None

    @abstractmethod
    def stop(self) -> None:
        """Let go of it; a private one ends. Idempotent."""

    def measure_startup(self, facts: EngineFacts) -> list[tuple[str, float]]:
        """The start-up table, now that it is ready: rows add up to the time since it was asked for."""
        elapsed = time.time() - self.started_at
        if facts.started_at < self.started_at:  # it was there already
            return [("attach", elapsed)]
        known = sum(seconds for _, seconds in facts.startup)
        first = facts.started_at - self.started_at
        return [("start core process", first), *facts.startup, ("handshake", elapsed - first - known)]


class EngineProcess(Engine):
    """A private core and its run directory. One lost after it was ready is replaced, within limits."""

    linger_ms = 0

    def __init__(self, config: EngineConfig) -> None:
        self.started_at = time.time()
        self.run_dir = RunDirectory.create_private()
        self._core = CoreChild(self.run_dir, config, CORE_MODULE)
        self.address = self._core.address
        self._owner_pid = os.getpid()
        self._start()

    def check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise EngineDeadError("this process is a fork of the engine's owner; make an engine of its own")

    def describe_end(self) -> str | None:
        if self._core.start_at is not None or self.process.exit_code is None:
            return None
        return self._core.end_reason or self.process.describe_exit()

    @property
    def last_words_ms(self) -> int:
        was_killed = (self.process.exit_code or 0) < 0  # what it had to say the next one will say
        return 0 if was_killed else LAST_WORDS_MS

    def plan_restart(self) -> PlannedRestart | None:
        if self.process.exit_code in _FINAL_EXIT_CODES or os.getpid() != self._owner_pid:
            return None
        now = time.monotonic()
        if not self._core.replace(self.process.describe_exit(), now) or self._core.start_at is None:
            return None
        return PlannedRestart(self._core.start_at - now, self._start_again)

    def stop(self) -> None:
        """End everything, unless this is a fork of the owner: what it inherited is not its own."""
        if os.getpid() != self._owner_pid:
            return
        self.process.stop(STOP_GRACE_S)
        self.run_dir.remove()

    def _start_again(self) -> None:
        try:
            self.run_dir.maintain()
        except QuireError as error:  # the core says what it cannot do without
            _log.error("%s", error)
        self._start()

    def _start(self) -> None:
        watch = self._core.start()
        self.exit_fd = self.process.pid_fd
        self.watch = watch if self._core.is_watched else None

    @property
    def process(self) -> ChildProcess:
        """The core, also when it has ended and was not replaced."""
        assert self._core.process is not None
        return self._core.process


class DaemonEngine(Engine):
    """The engine of a running daemon: it stays when this client leaves."""

    linger_ms = 200

    def __init__(self, name: str) -> None:
        """Raises ConfigError for a name that cannot be one, DaemonError if no such daemon runs."""
        self.started_at = time.time()
        self._name = name
        self._owner_pid = os.getpid()
        directory = find_named(name)
        self._pid = find_daemon(name)
        try:
            self.exit_fd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            raise DaemonError(f"the daemon {name!r} has just ended") from None
        self.address = make_ipc_address(str(directory / CLIENT_SOCKET_NAME))

    def check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise EngineDeadError("this process is a fork of an attached one; attach by itself")

    def describe_end(self) -> str | None:
        if self.exit_fd < 0:  # this client has left
            return None
        has_ended = wait_readable(self.exit_fd, 0)
        return f"the daemon {self._name!r} (pid {self._pid}) has ended" if has_ended else None

    def stop(self) -> None:
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            self.exit_fd = -1
