"""The engines that a client talks to: a private one that it owns, or a daemon's. Knows no message."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from ...ipc.daemon.daemon_state import CLIENT_SOCKET_NAME, make_engine_name
from ...ipc.daemon.run_dir import RunDirectory, find_daemon, find_named
from ...ipc.errors import DaemonError, EngineDeadError, FilesChangedError, QuireError
from ...ipc.network.keys import ClientKeys
from ...ipc.processes.child_args import CORE_MODULE
from ...ipc.processes.liveness import ChildWatch
from ...ipc.processes.managed_child import STOP_GRACE_S, CoreChild
from ...ipc.processes.own_sources import check_own_sources
from ...ipc.processes.process import EXIT_OK, EXIT_WORKER_LOST, ChildProcess, wait_readable
from ...ipc.protocol.messages import EngineFacts, RosterEntry
from ...ipc.protocol.sockets import make_ipc_address
from ...ipc.spec.config import EngineConfig
from .handshake_watch import HandshakeWatch

LAST_WORDS_MS = 100

# Another core would end in the same way, or was told to end.
_FINAL_EXIT_CODES = (EXIT_OK, EXIT_WORKER_LOST)

_log = logging.getLogger(__name__)


class PlannedRestart(msgspec.Struct, frozen=True):
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
    index: int = 0  # in its group
    is_own: bool = False  # it was started by this client and ends with it
    watch: ChildWatch | None = None  # of an engine that this client may kill
    keys: ClientKeys | None = None  # with which it is talked to over the network
    handshakes: HandshakeWatch | None = None  # told of what becomes of connections over the network

    @property
    def failure(self) -> str | None:
        """Why no connection to it can be made, None as far as is known."""
        return None if self.handshakes is None else self.handshakes.failure

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

    def make_sibling(self, entry: RosterEntry) -> Engine:
        """Another engine of its group. Raises DaemonError or ConfigError if it cannot be reached."""
        raise DaemonError(f"engine {entry.index} is not of a daemon")

    def find_siblings(self) -> list[RosterEntry]:
        """The engines of its group, as far as they can be seen without asking one of them."""
        return []

    def on_silence(self, reconnect: Callable[[], None]) -> None:
        """What is to be called when it does not answer, if it cannot be killed."""
        del reconnect

    def note_index(self, index: int) -> None:
        """Its number in its group, as it says itself; for whom only an address is known."""
        del index

    def check_facts(self, facts: EngineFacts) -> EngineFacts:
        """Its facts from a Welcome as they hold on this machine. Raises ModelError."""
        return facts

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
    is_own = True

    def __init__(self, config: EngineConfig, index: int = 0) -> None:
        self.started_at = time.time()
        self.index = index
        self._ends_at: float | None = None  # when it is killed if it has not ended by itself
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
        try:
            check_own_sources()
        except FilesChangedError as error:
            self._core.end_reason = f"{self.process.describe_exit()}, and no other is started: {error}"
            return None
        if not self._core.replace(self.process.describe_exit(), now) or self._core.start_at is None:
            return None
        return PlannedRestart(self._core.start_at - now, self._start_again)

    def ask_to_end(self) -> None:
        """Let it end by itself meanwhile; its time to do so runs from here to `stop`."""
        if os.getpid() == self._owner_pid:
            self.process.close_lifeline()
            self._ends_at = time.monotonic() + STOP_GRACE_S

    def stop(self) -> None:
        """End everything, unless this is a fork of the owner: what it inherited is not its own."""
        if os.getpid() != self._owner_pid:
            return
        ends_at = self._ends_at or time.monotonic() + STOP_GRACE_S
        self.process.stop(max(0.0, ends_at - time.monotonic()))
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


class AttachedEngine(Engine):
    """An engine that stays when this client leaves."""

    linger_ms = 200

    def __init__(self, index: int) -> None:
        self.started_at = time.time()
        self.index = index
        self._owner_pid = os.getpid()

    def check_owner(self) -> None:
        if os.getpid() != self._owner_pid:
            raise EngineDeadError("this process is a fork of an attached one; attach by itself")

    def stop(self) -> None:
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            self.exit_fd = -1


class DaemonEngine(AttachedEngine):
    """The engine of a running daemon on this machine."""

    def __init__(self, name: str, index: int = 0, socket_name: str = CLIENT_SOCKET_NAME) -> None:
        """Raises ConfigError for a name that cannot be one, DaemonError if no such daemon runs."""
        super().__init__(index)
        self._name = name
        directory = find_named(name)
        self._pid = find_daemon(name)
        try:
            self.exit_fd = os.pidfd_open(self._pid)
        except ProcessLookupError:
            raise DaemonError(f"the daemon {name!r} has just ended") from None
        self.address = make_ipc_address(str(directory / socket_name))

    def make_sibling(self, entry: RosterEntry) -> Engine:
        return DaemonEngine(self._name, entry.index, entry.socket)

    def find_siblings(self) -> list[RosterEntry]:
        return _find_entries(self._name)

    def describe_end(self) -> str | None:
        if self.exit_fd < 0:  # this client has left
            return None
        has_ended = wait_readable(self.exit_fd, 0)
        return f"the daemon {self._name!r} (pid {self._pid}) has ended" if has_ended else None


def start_engines(config: EngineConfig) -> list[Engine]:
    """As many private engines as the config says, which start at the same time."""
    count = config.parallel.data_parallel_size
    engines: list[Engine] = []
    try:
        for rank in range(count):
            engine_config = config if count == 1 else config.for_engine(rank, count)
            engines.append(EngineProcess(engine_config, rank))
    except BaseException:
        for engine in engines:
            engine.stop()
        raise
    return engines


def find_engines(name: str) -> list[Engine]:
    """The engines of a running daemon, as far as their sockets lie there: its roster says which there are.

    Raises ConfigError for a name that cannot be one, DaemonError if no such daemon runs.
    """
    entries = _find_entries(name) or [RosterEntry(0, CLIENT_SOCKET_NAME)]
    return [DaemonEngine(name, entry.index, entry.socket) for entry in entries]


def _find_entries(name: str) -> list[RosterEntry]:
    stem, _, suffix = CLIENT_SOCKET_NAME.partition(".")
    numbers = [path.stem.removeprefix(stem) or "0" for path in find_named(name).glob(f"{stem}*.{suffix}")]
    indexes = sorted(int(number) for number in numbers if number.isdecimal())
    return [RosterEntry(index, make_engine_name(CLIENT_SOCKET_NAME, index)) for index in indexes]
