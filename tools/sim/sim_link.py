"""SimLink: a simulated client's way to one engine: the real EngineConnection over the simulated network."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ...frontend.client.engine_connection import EngineConnection
from ...frontend.client.engines import Engine
from ...ipc.protocol.messages import MESSAGE_TYPES, ProtocolNotice, RosterEntry
from ...ipc.protocol.send_window import SendWindow
from .network import Connection, Network, Timeline
from .sim_core import SimCore
from .violation import Violation

_RECONNECT_S = 0.02
_LONGEST_RECONNECT_S = 0.5  # a place may be empty for seconds, and a run has only so many events
_NOTICE = next(head for head, kind in MESSAGE_TYPES.items() if kind is ProtocolNotice)


class SimEngine(Engine):
    """An engine that is always there, or will be again: the roster says if not."""

    def __init__(
        self,
        index: int,
        network: Network,
        find_core: Callable[[], SimCore | None],
        window_bytes: int | None = None,
    ) -> None:
        """`window_bytes`: as Scenario's."""
        self.index, self.network, self.find_core = index, network, find_core
        self.window_bytes = window_bytes
        self.siblings: Callable[[int], SimEngine] | None = None

    def make_sibling(self, entry: RosterEntry) -> Engine:
        assert self.siblings is not None
        return self.siblings(entry.index)

    def check_owner(self) -> None:
        pass

    def describe_end(self) -> None:
        return None

    def stop(self) -> None:
        pass


class Owner(Protocol):
    """The client that it is of."""

    is_dead: bool
    stopped_until: float

    def wake(self, link: SimLink) -> None:
        """Something has arrived, or has become of the connection."""
        ...


class SimLink:
    """Connects as soon as there is a core, and again whenever its connection has ended."""

    def __init__(
        self,
        owner: Owner,
        identity: bytes,
        engine: SimEngine,
        timeline: Timeline,
        rng: random.Random,
    ) -> None:
        self.identity = identity
        self.engine: Engine = engine
        self.is_gone = False
        self.connection = EngineConnection(engine, self, "simulated", 1.0)
        self.protocol = self.connection.protocol
        self._window_bytes = engine.window_bytes
        self._longest_bytes = 0  # of the messages that it has sent
        if self._window_bytes is not None:
            self.protocol.window = SendWindow(self._window_bytes, max(1, self._window_bytes // 4))
        self._owner = owner
        self._network = engine.network
        self._timeline = timeline
        self._rng = rng
        self._find_core = engine.find_core
        self._connection: Connection | None = None
        self._events: list[bool] = []  # of the connection, not yet noticed
        self._inbox: deque[tuple[bytes, ...]] = deque()
        self._num_missed = 0  # tries in a row to which no core has listened
        self._connect_soon()

    @property
    def stopped_until(self) -> float:
        """Nothing reaches its client before."""
        return self._owner.stopped_until

    @property
    def index(self) -> int:
        """Of its engine."""
        return self.engine.index

    def close(self) -> None:
        """Leave the engine for good."""
        self.is_gone = True
        self.lose()

    def lose(self) -> None:
        """Its connection ends, if there is one."""
        if self._connection is not None and not self._connection.is_cut:
            self._network.lose(self._connection)

    # -- what EngineConnection sends and receives by

    def send(self, frames: tuple[bytes]) -> bool:
        """Send if there is a connection."""
        if self._connection is None:
            return False
        self._network.send_up(self._connection, frames)
        self._longest_bytes = max(self._longest_bytes, len(frames[0]))
        if self._window_bytes is not None:
            # Beyond the window goes what comes until the next PING, and PINGs.
            at_most = self._window_bytes * 5 // 4 + 2 * self._longest_bytes
            num_bytes = self._connection.num_unread
            if num_bytes > at_most:
                raise Violation(f"{num_bytes} bytes of {self.identity!r} are unread, at most {at_most}")
        return True

    def receive(self) -> list[bytes] | None:
        """The next message that has arrived. Violation if it complains: all that is sent here can be read.

        What is said before a Welcome may be about a message of the connection before.
        """
        if not self._inbox:
            return None
        frames = list(self._inbox.popleft())
        if frames[0].startswith(_NOTICE) and self.protocol.is_open:
            raise Violation(f"a frame of {self.identity!r} was refused: {frames[0][1:]!r}")
        return frames

    def read_connection_events(self) -> list[bool]:
        """What has become of the connection."""
        events, self._events = self._events, []
        return events

    # -- the network's side

    def arrive(self, frames: tuple[bytes, ...]) -> None:
        """A message has arrived at the socket."""
        self._inbox.append(frames)
        self._owner.wake(self)

    def note_connection(self, connection: Connection, is_up: bool) -> None:
        """The socket's monitor has news."""
        if connection is not self._connection:
            return
        if not is_up:
            self._connection = None
            self._connect_soon()
        self._events.append(is_up)
        self._owner.wake(self)

    def _connect_soon(self) -> None:
        longest_s = min(_RECONNECT_S * 2**self._num_missed, _LONGEST_RECONNECT_S)
        self._timeline.call_at(self._timeline.now + self._rng.uniform(0.0, longest_s), self._connect)

    def _connect(self) -> None:
        core = self._find_core()
        if self._owner.is_dead or self.is_gone:
            return
        if core is None:
            self._num_missed += 1
            self._connect_soon()
            return
        self._num_missed = 0
        self._connection = self._network.connect(core, self)
        self.note_connection(self._connection, True)
