"""SimDaemon: the supervisor of simulated engines: the real SupervisedGroup and GroupCommands.

Its cores are SimCores in the place of processes, and its sockets ends of the simulated network.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import zmq

from ...core.clients.client_registry import GroupRoster
from ...core.supervision.group_commands import GroupCommands
from ...core.supervision.supervised_group import SupervisedGroup
from ...ipc.daemon.daemon_control import Answer, Command
from ...ipc.daemon.run_dir import RunDirectory
from ...ipc.processes.managed_child import CoreChild
from ...ipc.processes.process import ProcessHandle
from ...ipc.protocol.messages import EngineRoster
from ...ipc.spec.config import EngineConfig
from .network import Connection, Network, Timeline
from .sim_core import SimCore

_LONGEST_TURN_S = 0.002
_TICK_S = 1.0  # it looks so often while a command is done
KILLED = -9


class SimPlace:
    """An engine's place: its network, and one core after the other."""

    def __init__(self, network: Network, journal_path: str) -> None:
        self.network = network
        self.journal_path = journal_path
        self.core: SimCore | None = None
        self.process: SimProcess | None = None
        self.plans: deque[str] = deque()  # how its next starts go; "" beyond: well

    def end(self, exit_code: int) -> None:
        """The process ends that is there, if one is."""
        if self.process is not None:
            self.process.end(exit_code)


class SimProcess(ProcessHandle):
    """What a supervisor holds of a core."""

    def __init__(self, pid: int, place: SimPlace, on_exit: Callable[[], None]) -> None:
        self.role, self.pid, self.pid_fd = "engine-core", pid, pid
        self._killed_because = None
        self._place = place
        self._on_exit = on_exit
        self._exit_code: int | None = None

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    @property
    def is_computing(self) -> bool:
        return False

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def cpu_time_s(self) -> float:
        return 0.0

    def end(self, exit_code: int) -> None:
        """It ends now, with its core."""
        if self._exit_code is None:
            self._exit_code = exit_code
            if self._place.core is not None:
                self._place.core.crash()
                self._place.core = None
            self._on_exit()

    def close_lifeline(self) -> None:
        self.end(0)

    def stop(self, grace_s: float) -> int:
        del grace_s
        self.end(0)
        return self._reap()

    def _reap(self) -> int:
        assert self._exit_code is not None
        return self._exit_code


class _SimCoreChild(CoreChild):
    """Starts SimCores."""

    def __init__(self, daemon: SimDaemon, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_watched = False
        self._daemon = daemon

    def _start_core(self) -> Any:
        return self._daemon.start_core(self._args.engine_index, self._args.roster, self.owner_identity)

    def remove_socket(self) -> None:
        """There is no file."""


class _SimSocket:
    """A DEALER, as far as ProtocolLink uses one. It does not connect again, as its core does not either."""

    stopped_until = 0.0

    def __init__(self, daemon: SimDaemon) -> None:
        self.identity = b""
        self._daemon = daemon
        self._place: SimPlace | None = None
        self._connection: Connection | None = None
        self._inbox: deque[list[bytes]] = deque()

    def setsockopt(self, option: int, value: Any) -> None:
        if option == zmq.IDENTITY:
            self.identity = value

    def connect(self, address: str) -> None:
        self._place = self._daemon.find_place(int(address.rpartition("core")[2].removesuffix(".sock") or 0))

    def poll(self, timeout_ms: int, flags: int) -> bool:
        del timeout_ms, flags
        assert self._place is not None
        if self._connection is None and self._place.core is not None:
            self._connection = self._place.network.connect(self._place.core, self)
        return self._connection is not None

    def recv_multipart(self, flags: int) -> list[bytes]:
        del flags
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        del flags
        if self._connection is None or self._place is None:
            raise zmq.Again
        self._place.network.send_up(self._connection, frames)

    def close(self, linger: int) -> None:
        del linger
        if self._connection is not None and self._place is not None and not self._connection.is_cut:
            self._place.network.lose(self._connection)

    def arrive(self, frames: tuple[bytes, ...]) -> None:
        """A message has come."""
        self._inbox.append(list(frames))
        self._daemon.wake()

    def note_connection(self, connection: Connection, is_up: bool) -> None:
        """The end of its core is seen by its process."""


class _SimContext:
    def __init__(self, daemon: SimDaemon) -> None:
        self._daemon = daemon

    def socket(self, kind: int) -> _SimSocket:
        del kind
        return _SimSocket(self._daemon)


class _SimPoller:
    """The daemon itself knows what is ready."""

    def register(self, *_: object) -> None: ...
    def unregister(self, *_: object) -> None: ...


class SimDaemon:
    """Runs a turn whenever something has happened."""

    def __init__(
        self,
        config: EngineConfig,
        timeline: Timeline,
        rng: random.Random,
        find_place: Callable[[int], SimPlace],
        make_core: Callable[[SimPlace, GroupRoster, str], SimCore],
        run_dir: Path,
    ) -> None:
        """`make_core` starts a core in a place, and is told how its start goes."""
        self.find_place = find_place
        self.answers: dict[str, Answer] = {}  # to commands, by their senders' names
        self._timeline = timeline
        self._rng = rng
        self._make_core = make_core
        self._num_started = 0
        self._num_commands = 0
        self._ended: dict[object, int] = {}  # pid_fds of processes that have ended
        self._turn_at: float | None = None
        self.group = SupervisedGroup(
            cast(RunDirectory, _SimRunDir(run_dir)),
            config,
            "",
            cast("zmq.Poller", _SimPoller()),
            lambda _: None,
            context=cast(Any, _SimContext(self)),
            make_core=lambda *args, **options: _SimCoreChild(self, *args, **options),
            clock=timeline,
        )
        self._commands = GroupCommands(self.group, self._take_answer)
        self.wake()

    def command(self, command: Command) -> None:
        """Have it done. Its answer will be in `answers`."""
        self._num_commands += 1
        sender = f"{self._num_commands}: {command}"
        self._commands.start(sender, command)
        self.wake()

    @property
    def num_open_commands(self) -> int:
        """Those that are still being done."""
        return self._num_commands - len(self.answers)

    def start_core(self, index: int, roster: EngineRoster | None, owner: bytes) -> SimProcess:
        """As a new process would."""
        place = self.find_place(index)
        self._num_started += 1
        process = SimProcess(self._num_started, place, lambda: self._note_end(process))
        place.process = process
        plan = place.plans.popleft() if place.plans else ""
        place.core = self._make_core(place, GroupRoster(index, roster, owner), plan)
        return process

    def wake(self) -> None:
        """Let it take what has happened."""
        self._turn_by(self._timeline.now + self._rng.uniform(0.0, _LONGEST_TURN_S))

    def _note_end(self, process: SimProcess) -> None:
        self._ended[process.pid_fd] = zmq.POLLIN
        self.wake()

    def _take_answer(self, sender: str, answer: Answer) -> None:
        self.answers[sender] = answer

    def _turn_by(self, at: float) -> None:
        at = max(at, self._timeline.now)
        if self._turn_at is None or at < self._turn_at:
            self._turn_at = at
            self._timeline.call_at(at, lambda: self._turn_if_due(at))

    def _turn_if_due(self, at: float) -> None:
        if self._turn_at != at:
            return
        self._turn_at = None
        ended, self._ended = self._ended, {}
        self.group.follow(ended, self._timeline.now)
        self._commands.advance()
        self.group.tell_roster()
        self.group.start_due(self._timeline.now)
        if (next_at := self.group.next_check_at) is not None:
            self._turn_by(next_at)
        if self.num_open_commands:
            self._turn_by(self._timeline.now + _TICK_S)


class _SimRunDir:
    def __init__(self, path: Path) -> None:
        self.path = path

    def address_of(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"
