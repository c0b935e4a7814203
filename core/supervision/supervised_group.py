"""SupervisedGroup: the engines of a daemon by their numbers, and the roster that they are sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import zmq

from ...ipc.daemon.daemon_state import CLIENT_SOCKET_NAME, EngineState, make_engine_name
from ...ipc.daemon.run_dir import RunDirectory
from ...ipc.errors import DaemonError
from ...ipc.files.file_identity import check_loaded
from ...ipc.processes.due import find_earliest
from ...ipc.processes.managed_child import CoreChild
from ...ipc.processes.own_sources import check_own_sources
from ...ipc.protocol.messages import EngineRoster, RosterEntry
from ...ipc.spec.config import MAX_ENGINES, EngineConfig
from .network_ports import NetworkPorts
from .supervised_engine import SupervisedEngine

_log = logging.getLogger(__name__)


class SupervisedGroup:
    """Starts, follows and ends a daemon's engines. A single engine has no roster."""

    def __init__(
        self,
        run_dir: RunDirectory,
        config: EngineConfig,
        module: str,
        poller: zmq.Poller,
        on_phase: Callable[[str], None],
        ports: NetworkPorts | None = None,
        *,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        make_core: Callable[..., CoreChild] = CoreChild,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`module`: a core's (child_args.py). `on_phase` is called with the phases of the first start.
        `ports`: for clients of other machines. `context`, `make_core` and `clock` are for the simulator.
        """
        self.engines: dict[int, SupervisedEngine] = {}
        self._run_dir = run_dir
        self._config = config
        self._module = module
        self._poller = poller
        self._on_phase = on_phase
        self._ports = ports
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self._make_core = make_core
        self.clock = clock
        self._next_index = 0
        self._roster: EngineRoster | None = None  # as it was sent last
        self._num_at_start = config.parallel.data_parallel_size
        for _ in range(self._num_at_start):
            self.add()
        self.tell_roster()

    @property
    def running(self) -> list[SupervisedEngine]:
        """The engines that are not lost for good, by number."""
        return [engine for engine in self.engines.values() if engine.failure is None]

    @property
    def states(self) -> list[EngineState]:
        """The states of all engines, including those that are lost."""
        return [engine.state for engine in self.engines.values()]

    @property
    def last_loss(self) -> str:
        """Why a core was lost most recently; empty if none was."""
        latest = max(self.engines.values(), key=lambda engine: engine.lost_at, default=None)
        return "" if latest is None else latest.state.last_loss

    @property
    def next_check_at(self) -> float | None:
        """When there is something to do although nothing arrives. Monotonic, as all times."""
        return find_earliest(*(engine.next_check_at for engine in self.engines.values()))

    def start_due(self, now: float) -> bool:
        """Start every core that is due. Returns whether there was one."""
        self._set_ports()
        started = [engine.start_if_due(now) for engine in self.running]
        return any(started)

    def follow(self, ready: dict[object, int], now: float) -> None:
        """Take the messages of all cores. `ready` is the poller's result."""
        for engine in self.engines.values():
            engine.follow(ready, now)
        self._set_ports()

    def tell_roster(self) -> None:
        """Send every core the roster, if it has changed."""
        entries = [
            RosterEntry(e.state.index, e.state.socket, e.is_draining, not e.is_open) for e in self.running
        ]
        known = self._roster
        if (len(entries) < 2) if known is None else (entries == known.engines):
            return
        self._roster = roster = EngineRoster(entries, 1 if known is None else known.version + 1)
        for engine in self.engines.values():
            engine.tell_roster(roster)

    def find(self, index: int) -> SupervisedEngine:
        """An engine by its number. Raises DaemonError that says which there are."""
        engine = self.engines.get(index)
        if engine is None:
            known = ", ".join(map(str, self.engines))
            raise DaemonError(f"there is no engine {index}; there are {known}")
        return engine

    def do_others_serve(self, engine: SupervisedEngine) -> bool:
        """Whether another engine takes requests."""
        return any(other.is_open and not other.is_draining for other in self.running if other is not engine)

    def check_others_serve(self, engine: SupervisedEngine, wish: str) -> None:
        """Raise DaemonError if no other engine takes requests. `wish`: what was to be done with this one."""
        if not self.do_others_serve(engine):
            raise DaemonError(f"engine {engine.state.index} cannot be {wish}: no other takes requests")

    def add(self) -> SupervisedEngine:
        """Start one more, with a number that none has had. Raises DaemonError if there are too many,
        ConfigError if its port is not free, and FilesChangedError as `check_files`.
        """
        if len(self.engines) >= MAX_ENGINES:
            raise DaemonError(
                f"there are {len(self.engines)} engines, and no more than {MAX_ENGINES} are allowed"
            )
        if self.engines:
            self.check_files()
        index, rank = self._next_index, self._find_free_rank()
        network = None if self._ports is None else self._ports.open(index)
        core = self._make_core(self._run_dir, self._config, self._module, index, network, is_supervised=True)
        core.set_roster(self._roster)
        state = EngineState(index=index, socket=make_engine_name(CLIENT_SOCKET_NAME, index))
        engine = SupervisedEngine(
            core, state, self._context, self._poller, lambda phase: self._note_phase(index, phase), self.clock
        )
        engine.set_share(rank, max(self._num_at_start, rank + 1))
        self.engines[index] = engine
        self._next_index += 1
        return engine

    def restart(self, engine: SupervisedEngine) -> None:
        """Restart it; its next core has the keys that are in the daemon's files now.

        Raises FilesChangedError as `check_files`.
        """
        self.check_files()
        if self._ports is not None:
            self._ports.renew_keys()
            engine.set_network(self._ports.open(engine.state.index))
        engine.restart()

    def check_files(self) -> None:
        """Raise FilesChangedError if a new core could not start: the present one had better run on."""
        model = self._config.model
        check_own_sources()
        check_loaded(model.noted, model.model, model.tokenizer)

    def remove(self, engine: SupervisedEngine) -> None:
        """Send all the new roster, then end the engine and wait for its end."""
        del self.engines[engine.state.index]
        self.tell_roster()
        if self._roster is not None:
            engine.tell_roster(self._roster)  # for its own clients
        engine.stop()
        if self._ports is not None:
            self._ports.close_one(engine.state.index)

    def set_shares(self) -> None:
        """Divide the machine anew, for the cores that are started from now on."""
        for rank, engine in enumerate(self.engines.values()):
            engine.set_share(rank, len(self.engines))

    def begin_stop(self) -> None:
        """Ask all to end; none is started any more."""
        for engine in self.engines.values():
            engine.begin_stop()

    def stop(self) -> None:
        """End all, and wait for that. Idempotent."""
        self.begin_stop()
        for engine in self.engines.values():
            engine.stop()
        self._context.destroy(linger=0)

    def _set_ports(self) -> None:
        """Have the ports of engines that are lost for good refuse connections."""
        if self._ports is not None:
            self._ports.refuse_at({e.state.index for e in self.engines.values() if e.failure is not None})

    def _find_free_rank(self) -> int:
        taken = {engine.rank for engine in self.running}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)

    def _note_phase(self, index: int, phase: str) -> None:
        self._on_phase(phase if len(self.engines) == 1 else f"engine {index}: {phase}")
