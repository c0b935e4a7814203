"""SimCore: one life of the engine core's process: the real EngineLoop on the simulated network and clock."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from ...core.clients.client_registry import ClientRegistry, GroupRoster
from ...core.engine.engine_core import EngineCore
from ...core.engine.engine_loop import EngineLoop
from ...core.stats.engine_facts import StartupClock
from ...ipc.protocol.messages import EngineCoreOutputs, EngineCoreRequest
from ...ipc.spec.config import EngineConfig
from .end_watch import EndWatch
from .network import Network, Timeline
from .scenario import FaultKind, Scenario
from .sim_executor import SimExecutor
from .violation import require_none

_LONGEST_TURN_S = 0.001
_LAST_WORDS_S = 0.5


class _SimRegistry(ClientRegistry):
    """Notes of each request whether the first core that got it took it on, and when it must have ended."""

    was_accepted: dict[str, bool]
    ends: EndWatch
    timeline: Timeline

    def take(self, identity: bytes, message: object) -> None:
        num_before = 0 if self.core is None else self.core.num_unfinished
        if self.core is not None and identity in self.clients:
            self.ends.note(self.core, identity, message, self.timeline.now)
        super().take(identity, message)
        if isinstance(message, EngineCoreRequest) and self.core is not None:
            self.was_accepted.setdefault(message.request_id, self.core.num_unfinished > num_before)


class SimCore:
    """A core that starts now; `crash` ends it."""

    def __init__(
        self,
        epoch: str,
        scenario: Scenario,
        config: EngineConfig,
        journal_path: str,
        was_accepted: dict[str, bool],
        network: Network,
        timeline: Timeline,
        rng: random.Random,
        on_turn: Callable[[SimCore], None],
        on_poisoned: Callable[[], None],
        on_end: Callable[[int], None],
        group: GroupRoster | None = None,
        plan: str = "",
    ) -> None:
        """`on_poisoned`: a request has killed this core, which the caller is to `crash`; so with `on_end` and
        its exit code when its start has failed. `plan`: how the start goes, "" is well.
        """
        self.epoch = epoch
        self.owner = b"" if group is None else group.owner
        self._on_end = on_end
        self._ends_at: float | None = None  # who waits has been told that its start has failed
        self._has_told_owner = False
        self._network = network
        self._timeline = timeline
        self._rng = rng
        self._on_turn = on_turn
        self.is_dead = False
        self.num_accidents = 0  # steps and workers lost that no request is to blame for
        self.num_shortages = 0  # of memory, likewise
        self._inbox: deque[tuple[bytes, tuple[bytes, ...], Callable[[], None]]] = deque()
        self._turn_at: float | None = None
        self.registry = _SimRegistry(epoch, timeline(), self._send, timeline, group)
        self.registry.was_accepted, self.registry.timeline = was_accepted, timeline
        self._ends = self.registry.ends = EndWatch()
        self._executor = SimExecutor(config, scenario, timeline, rng, self._wake, on_poisoned, plan)
        startup = StartupClock("start core", timeline())
        self._loop = EngineLoop(
            config, self._executor, self.registry, startup, journal_path, timeline, timeline, b"simulated"
        )
        self._loop.start()

    @property
    def core(self) -> EngineCore | None:
        """None until the worker was ready for the first time."""
        return self.registry.core

    # -- the network's side

    def receive(self, identity: bytes, frames: tuple[bytes, ...], note_read: Callable[[], None]) -> None:
        """A message has arrived at the ROUTER; `note_read` is called once it is read."""
        self._inbox.append((identity, frames, note_read))
        self._wake()

    def note_disconnect(self) -> None:
        """The ROUTER's monitor says that a connection has ended."""
        self.registry.leases.note_disconnect()
        self._wake()

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        was_sent = self._network.send_down(identity, self._loop.codec.encode(message))
        if was_sent and isinstance(message, EngineCoreOutputs):
            require_none(self._ends.find_late(identity, message.outputs))
        return was_sent

    # -- faults

    def crash(self) -> None:
        """End at once, with the worker."""
        self.is_dead = True
        self._executor.stop(0.0)
        self._network.lose_all()

    def harm_worker(self, kind: FaultKind) -> None:
        """As SimExecutor's."""
        if self._executor.harm_worker(kind):
            self.num_shortages += kind is FaultKind.SHORTAGE
            self.num_accidents += kind is not FaultKind.SHORTAGE

    # -- turns

    def _wake(self) -> None:
        self._turn_by(self._timeline.now + self._rng.uniform(0.0, _LONGEST_TURN_S))

    def _turn_by(self, at: float) -> None:
        at = max(at, self._timeline.now)
        if not self.is_dead and (self._turn_at is None or at < self._turn_at):
            self._turn_at = at
            self._timeline.call_at(at, lambda: self._turn_if_due(at))

    def _turn_if_due(self, at: float) -> None:
        if self._turn_at == at and not self.is_dead:
            self._turn_at = None
            if self._loop.end is not None:
                self._take_leave()
                return
            require_none(self._ends.find_overdue(self.core, at, _LONGEST_TURN_S))
            self._loop.run_turn(self._drain_inbox())
            require_none(self._ends.find_overdue(self.core, at))
            if self._loop.end is not None:
                assert self.core is None, self._loop.end
                self.registry.refuse(self._loop.end.reason, self._loop.end.kind)
                self._ends_at = self._timeline.now + _LAST_WORDS_S
                self._turn_by(self._timeline.now)
                return
            self._on_turn(self)
            if (next_at := self._loop.next_turn_at) is not None:
                self._turn_by(next_at)

    def _take_leave(self) -> None:
        """As engine_process.py does after a start that has failed."""
        assert self._loop.end is not None
        assert self._ends_at is not None
        self._loop.take_messages(self._drain_inbox())
        self.registry.deliver()
        self._has_told_owner = self._has_told_owner or self.registry.has_owner
        is_over = self._has_told_owner and not self.registry.clients
        if is_over or self._timeline.now >= self._ends_at:
            self._on_end(self._loop.end.exit_code)
        else:
            self._turn_by(self._ends_at)

    def _drain_inbox(self) -> Iterator[tuple[bytes, tuple[bytes, ...]]]:
        while self._inbox:
            identity, frames, note_read = self._inbox.popleft()
            note_read()
            yield identity, frames
