"""Time and the network of a simulated run.

The network keeps ZeroMQ's promises and no more: within one connection messages arrive in order, or a tail
of them is lost with it; what arrived before the end may be read after the next connection's first messages.
A ROUTER knows a peer by its identity: a new connection takes it over from the old one, whose late messages
then come from a stranger. Beyond that, messages to clients may arrive twice.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

FIRST_MOMENT = 1000.0


class Timeline:
    """What happens when; a callable clock. Equal moments keep the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = FIRST_MOMENT
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_entered = 0

    def __call__(self) -> float:
        return self.now

    def call_at(self, at: float, action: Callable[[], None]) -> None:
        """Do it then; at once if that is past."""
        self._num_entered += 1
        heapq.heappush(self._heap, (max(at, self.now), self._num_entered, action))

    def run_next(self) -> bool:
        """Let the next thing happen; False if nothing is left."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True


class Server(Protocol):
    """What a connection ends in on the engine's side."""

    def receive(
        self, identity: bytes, frames: tuple[bytes, ...], note_read: Callable[[], None], /
    ) -> None: ...
    def note_disconnect(self) -> None: ...


class Peer(Protocol):
    """What a connection ends in on the client's side."""

    identity: bytes

    @property
    def stopped_until(self) -> float:
        """Nothing reaches it before."""
        ...

    def arrive(self, frames: tuple[bytes, ...]) -> None: ...
    def note_connection(self, connection: Connection, is_up: bool) -> None: ...


@dataclass(slots=True)
class _Way:
    """One direction: messages are numbered in the order in which they were sent."""

    last_at: float = 0.0
    num_sent: int = 0
    num_arrived: int = 0
    num_kept: int | None = None  # of an ended connection: messages from this number on are lost
    held: deque[Callable[[], None]] = field(
        default_factory=deque[Callable[[], None]]
    )  # by a stopped receiver


class Connection:
    """Between a client and one life of the core."""

    def __init__(self, server: Server, peer: Peer) -> None:
        self.server = server
        self.peer = peer
        self.is_cut = False
        self.num_unread = 0  # bytes that the client has sent and the core has not read
        self.late_s = 0.0  # what still arrives after the end does so this much later
        self.up = _Way()
        self.down = _Way()


class Network:
    """All connections to the one engine that there is at a time."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        delay_s: float,
        high_water_mark: int,
        repeat_share: float,
    ) -> None:
        self._timeline = timeline
        self._rng = rng
        self._delay_s = delay_s
        self._high_water_mark = high_water_mark
        self._repeat_share = repeat_share
        self._table: dict[bytes, Connection] = {}  # of the ROUTER

    def connect(self, server: Server, peer: Peer) -> Connection:
        """A connection that stands; an older one of the same identity is taken over."""
        old = self._table.get(peer.identity)
        if old is not None:
            self._cut(old)
        connection = self._table[peer.identity] = Connection(server, peer)
        return connection

    def lose(self, connection: Connection) -> None:
        """End a connection. Each side learns of it after a while of its own."""
        self._cut(connection)
        self._timeline.call_at(self._soon(), lambda: connection.peer.note_connection(connection, False))
        self._timeline.call_at(self._soon(), lambda: self._remove(connection))

    def lose_all(self) -> None:
        """The core's process has ended, and its sockets with it."""
        connections, self._table = list(self._table.values()), {}
        for connection in connections:
            if not connection.is_cut:
                self.lose(connection)

    def send_up(self, connection: Connection, frames: tuple[bytes, ...]) -> None:
        """From a client; lost if the connection has ended."""
        identity, num_bytes = connection.peer.identity, sum(map(len, frames))
        connection.num_unread += num_bytes

        def note_read() -> None:
            connection.num_unread -= num_bytes

        def arrive() -> None:
            is_known = self._table.get(identity) is connection or identity not in self._table
            connection.server.receive(identity if is_known else b"a stranger", frames, note_read)

        self._send(connection, connection.up, arrive)

    def send_down(self, identity: bytes, frames: tuple[bytes, ...]) -> bool:
        """To a client. False if too much is on its way. Raises ConnectionResetError if it is gone."""
        connection = self._table.get(identity)
        if connection is None:
            raise ConnectionResetError
        way = connection.down
        if way.num_sent - way.num_arrived >= self._high_water_mark:
            return False
        self._send(connection, way, lambda: connection.peer.arrive(frames))
        if self._rng.random() < self._repeat_share:
            again_at = self._draw_arrival() + self._rng.choice([0.0, 0.3])
            self._timeline.call_at(again_at, lambda: connection.peer.arrive(frames))
        return True

    def _send(self, connection: Connection, way: _Way, arrive: Callable[[], None]) -> None:
        number, way.num_sent = way.num_sent, way.num_sent + 1
        way.last_at = max(way.last_at, self._draw_arrival())

        def on_time() -> None:
            if way is connection.down and (way.held or connection.peer.stopped_until > self._timeline.now):
                self._hold(connection, take)
            else:
                take()

        def take() -> None:
            if way.num_kept is None:
                way.num_arrived += 1
                arrive()
            elif number < way.num_kept:
                self._timeline.call_at(self._timeline.now + connection.late_s, arrive)

        if not connection.is_cut:
            self._timeline.call_at(way.last_at, on_time)

    def _hold(self, connection: Connection, take: Callable[[], None]) -> None:
        """Keep a message, in order, until its receiver goes on."""
        held = connection.down.held

        def release() -> None:
            if connection.peer.stopped_until > self._timeline.now:
                self._timeline.call_at(connection.peer.stopped_until, release)
                return
            while held:
                held.popleft()()

        held.append(take)
        if len(held) == 1:
            self._timeline.call_at(connection.peer.stopped_until, release)

    def _cut(self, connection: Connection) -> None:
        if connection.is_cut:
            return
        connection.is_cut = True
        connection.late_s = self._rng.choice([0.0, 0.0, self._rng.uniform(0.0, 0.3)])
        for way in (connection.up, connection.down):
            way.num_kept = self._rng.choice(
                [way.num_arrived, way.num_sent, self._rng.randint(way.num_arrived, way.num_sent)]
            )

    def _remove(self, connection: Connection) -> None:
        """The ROUTER forgets an ended connection, unless it was taken over; its monitor says so."""
        if self._table.get(connection.peer.identity) is connection:
            del self._table[connection.peer.identity]
        connection.server.note_disconnect()

    def _draw_arrival(self) -> float:
        factor = 10.0 if self._rng.random() < 0.1 else 1.0
        return self._timeline.now + self._rng.uniform(0.0, self._delay_s * factor)

    def _soon(self) -> float:
        return self._timeline.now + self._rng.choice([0.0, 0.001, self._rng.uniform(0.0, 0.1)])
