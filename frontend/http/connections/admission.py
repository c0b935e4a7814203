"""What the connections of one process share: their places, their bytes, who may come in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from ....ipc.processes.heap import trim_heap
from ..errors import ApiError, overloaded
from ..limits import Limits
from ..observe.access_log import AccessLog
from .auth import ApiKeys
from .hosts import AllowedHosts

# Who gives way when a process is full: shares of connections and of stored bytes. A client is a text: the
# hash of its API key once it has shown one, else its address. Members are connections; methods answer who has
# to go, and the caller lets it go.

_NOTHING = "", 0

T = TypeVar("T")


class Standing(IntEnum):
    """A connection's state; idle ones give way in this order, busy ones never."""

    UNPROVEN = 0  # it has not sent a whole authorised request, or was refused
    IDLE = 1
    BUSY = 2  # an authorised request is under way


class ConnectionTable(Generic[T]):
    """The open connections of a process, those of one client by how long they have been idle."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._places: dict[T, tuple[str, Standing]] = {}
        self._idle: tuple[dict[str, dict[T, None]], ...] = ({}, {})  # by standing and client, oldest first
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, connection: T, client: str) -> T | None:
        """Take in a connection, unproven. Returns who is to be closed to make room for it.

        That is the one idle longest of the client with the most connections, unproven ones first; it is taken
        out here. When all are busy, it is `connection` itself, which is not taken in.
        """
        victim = None
        if len(self._places) >= self._max_connections:
            victim = self._find_victim()
            if victim is None:
                return connection
            self.remove(victim)
        self._place(connection, client, Standing.UNPROVEN)
        return victim

    def note_busy(self, connection: T, client: str) -> None:
        """It has sent the head of an authorised request, and is `client`'s from now on."""
        self._place(connection, client, Standing.BUSY)

    def note_idle(self, connection: T) -> None:
        """Its requests have been answered."""
        client, standing = self._places.get(connection, ("", None))
        if standing == Standing.BUSY:
            self._place(connection, client, Standing.IDLE)

    def renew(self, connection: T) -> None:
        """It has begun to send: of its client's idle ones it is the last to give way."""
        if (place := self._places.get(connection)) is not None:
            self._place(connection, *place)

    def demote(self, connection: T) -> None:
        """It has been refused: among the first to give way."""
        if (place := self._places.get(connection)) is not None:
            self._place(connection, place[0], Standing.UNPROVEN)

    def remove(self, connection: T) -> None:
        """Forget a connection; nothing happens when it is not known."""
        client, standing = self._places.pop(connection, ("", None))
        if standing is None:
            return
        self._num_of[client] -= 1
        if not self._num_of[client]:
            del self._num_of[client]
        if standing != Standing.BUSY:
            idle = self._idle[standing][client]
            del idle[connection]
            if not idle:
                del self._idle[standing][client]

    def _place(self, connection: T, client: str, standing: Standing) -> None:
        self.remove(connection)
        self._places[connection] = client, standing
        self._num_of[client] = self._num_of.get(client, 0) + 1
        if standing != Standing.BUSY:
            self._idle[standing].setdefault(client, {})[connection] = None

    def _find_victim(self) -> T | None:
        for idle in self._idle:
            if idle:
                client = max(idle, key=self._num_of.__getitem__)
                return next(iter(idle[client]))
        return None


class ByteShares(Generic[T]):
    """Bytes that the members hold, with a bound for all of them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: dict[T, tuple[str, int]] = {}  # the youngest last

    def hold(self, member: T, client: str, num_bytes: int) -> bool:
        """Note that `member` holds that much from now on. True when all together hold too much."""
        if not num_bytes and member not in self._held:
            return self.num_bytes > self.max_bytes
        _, held = self._held.pop(member, _NOTHING)
        if num_bytes:
            self._held[member] = client, num_bytes
        self.num_bytes += num_bytes - held
        return self.num_bytes > self.max_bytes

    def release(self, member: T) -> None:
        """It holds nothing any more."""
        self.num_bytes -= self._held.pop(member, _NOTHING)[1]

    def count_of(self, client: str) -> int:
        """Bytes that a client's members hold together."""
        return sum(num_bytes for name, num_bytes in self._held.values() if name == client)

    def find_victim(self, member: T, client: str) -> T:
        """Who has to give up what it holds so that `member` can have its bytes.

        That is one of the client that holds most: `member` if it is that client's, else its youngest.
        """
        totals: dict[str, int] = {}
        for name, num_bytes in self._held.values():
            totals[name] = totals.get(name, 0) + num_bytes
        largest = max(totals, key=totals.__getitem__)
        if largest == client:
            return member
        return next(one for one in reversed(self._held) if self._held[one][0] == largest)


class AdmittedConnection(Protocol):
    """A connection as those beside it see it. client_name: in shares, whose it is."""

    client_name: str

    @property
    def is_ending(self) -> bool:
        """It has been given its last answer."""
        ...

    def give_way(self, error: ApiError) -> None:
        """Let go of bytes that it holds: the error is its last answer."""

    def close_now(self) -> None:
        """Close it without one."""

    def pause_reading(self) -> None:
        """Others have a turn."""

    def continue_reading(self) -> None:
        """It has its turn again."""


# Connections that send much take turns, so that one turn of the event loop reads only so much. libuv
# reads a connection for as long as bytes are there, up to 8 MB: 75 uploads held the loop for 1.3 s.

_LARGE_READ_BYTES = 2**16  # uvloop reads at most 256 KiB at once
_READERS_A_TURN = 4


class ReadTurns:
    """Of one process. Methods are called in its event loop."""

    def __init__(self) -> None:
        self._waiting: deque[AdmittedConnection] = deque()

    def note_read(self, reader: AdmittedConnection, num_bytes: int) -> None:
        """So much came in one go: who has read much waits for its next turn."""
        if num_bytes < _LARGE_READ_BYTES:
            return
        reader.pause_reading()
        self._waiting.append(reader)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        for _ in range(min(_READERS_A_TURN, len(self._waiting))):
            self._waiting.popleft().continue_reading()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_turn)


# Gives back to the kernel what large requests took: malloc keeps it for the next ones. Knows no
# connections: who has ended a large request says so.

LARGE_BYTES = 2**17  # of a body; what smaller ones leave is soon taken again
_DELAY_S = 1.0


class MemoryTrimmer:
    """Of one process. Methods are called in its event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def note_ended(self, size_bytes: int) -> None:
        """A request with a body of that size has been answered, or its client has left."""
        if size_bytes >= LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, trim_heap)


class Admission:
    """What the connections of one process share: its limits, keys and room.

    body_paths: where a POST has a body; that of any other request is not stored. root_path: what is taken
    away from the beginning of paths. hosts: whom requests have to be for; None: whoever they name.
    open_connections: where they note themselves, with and without a place. run: has a request answered.
    """

    def __init__(
        self,
        limits: Limits,
        keys: ApiKeys,
        body_paths: frozenset[str],
        open_connections: set[Any],
        run: Callable[[Coroutine[Any, Any, None]], object],
        root_path: str = "",
        hosts: AllowedHosts | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        self.limits = limits
        self.keys = keys
        self.body_paths = body_paths
        self.root_path = root_path.encode()
        self.hosts = hosts
        self.access_log = access_log
        self.open_connections = open_connections
        self.run = run
        self.connections: ConnectionTable[AdmittedConnection] = ConnectionTable(limits.max_connections)
        self.headers: ByteShares[AdmittedConnection] = ByteShares(limits.max_total_header_bytes)
        self.bodies: ByteShares[AdmittedConnection] = ByteShares(
            max(limits.max_total_body_bytes, limits.max_body_bytes)
        )
        self.memory = MemoryTrimmer()
        self.read_turns = ReadTurns()

    def take_place(self, connection: AdmittedConnection) -> bool:
        """True when there is a place for it, which an idle connection may have had to give."""
        victim = self.connections.add(connection, connection.client_name)
        if victim is not None and victim is not connection:
            victim.close_now()
        return victim is not connection

    def note(self, connection: AdmittedConnection, num_header_bytes: int, num_body_bytes: int) -> bool:
        """Note what is stored of a connection's requests. True when it is too much for all."""
        client = connection.client_name
        is_over = self.headers.hold(connection, client, num_header_bytes)
        return self.bodies.hold(connection, client, num_body_bytes) or is_over

    def make_room(self, connection: AdmittedConnection) -> None:
        """Have connections give way until the bytes of all are within their bounds."""
        self._make_room(connection, self.headers, "headers", "max_total_header_bytes")
        self._make_room(connection, self.bodies, "bodies", "max_total_body_bytes")

    def release(self, connection: AdmittedConnection) -> None:
        """It has been given its last answer: others have its room."""
        self.headers.release(connection)
        self.bodies.release(connection)
        self.connections.demote(connection)

    def _make_room(
        self, connection: AdmittedConnection, shares: ByteShares[AdmittedConnection], what: str, limit: str
    ) -> None:
        while shares.num_bytes > shares.max_bytes and not connection.is_ending:
            victim = shares.find_victim(connection, connection.client_name)
            held = f"{shares.num_bytes} bytes under way, {shares.count_of(victim.client_name)} of them yours"
            victim.give_way(overloaded(f"{what}: {held}, at most {shares.max_bytes} ({limit})"))
