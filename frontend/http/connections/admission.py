"""What the connections of one process share, and who gives way when it is full.

A client is a text: the hash of its API key once it has shown one, else its address.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from ....ipc.processes.heap import trim_heap
from ..errors import ApiError, overloaded
from ..limits import Limits
from ..observe.access_log import AccessLog
from .auth import ApiKeys
from .hosts import AllowedHosts

LARGE_BYTES = 2**17  # of a body; what smaller ones leave is soon taken again
_TRIM_DELAY_S = 1.0
_BEGINNINGS_A_TURN = 2  # a request takes 0.3 ms and more of a pass of the event loop
_READERS_A_TURN = 4  # uvloop reads up to 8 MB of a connection that it does not have to leave

T = TypeVar("T", bound=Hashable)


class AdmittedConnection(Protocol):
    """A connection as those beside it see it. client_name: whose it is."""

    client_name: str
    is_ending: bool  # it has been given its last answer

    def give_way(self, error: ApiError) -> None:
        """Let go of bytes that it holds: the error is its last answer."""

    def close_now(self) -> None:
        """Close it without one."""

    def continue_reading(self) -> None:
        """Read on, unless there is more than enough already."""


class Standing(IntEnum):
    """A connection's state; idle ones give way in this order, busy ones never."""

    UNPROVEN = 0  # it has not sent a whole authorised request, or was refused
    IDLE = 1
    BUSY = 2  # an authorised request is under way


class ConnectionTable(Generic[T]):
    """The open connections of a process, and which of them is to be closed for a new one."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._places: dict[T, tuple[Standing, str]] = {}
        # By standing and client, the one idle longest first; no client's is empty.
        self._idle: tuple[dict[str, dict[T, None]], ...] = ({}, {})
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, connection: T, client: str) -> T | None:
        """Take in a connection, unproven. Returns who is to be closed to make room for it.

        That is the one idle longest of the client with the most connections, unproven ones first; it is taken
        out here. When all are busy, it is `connection` itself, which is not taken in.
        """
        victim = None
        if len(self._places) >= self._max_connections:
            idle = next((idle for idle in self._idle if idle), None)
            if idle is None:
                return connection
            victim = next(iter(idle[max(idle, key=self._num_of.__getitem__)]))
            self.remove(victim)
        self._place(connection, Standing.UNPROVEN, client)
        return victim

    def note_busy(self, connection: T, client: str) -> None:
        """It has sent the head of an authorised request, and is `client`'s from now on."""
        self._place(connection, Standing.BUSY, client)

    def note_idle(self, connection: T) -> None:
        """Its requests have been answered."""
        standing, client = self._places.get(connection, (None, ""))
        if standing == Standing.BUSY:
            self._place(connection, Standing.IDLE, client)

    def renew(self, connection: T) -> None:
        """It has begun to send: of its client's idle ones it is the last to give way."""
        if (place := self._places.get(connection)) is not None:
            self._place(connection, *place)

    def demote(self, connection: T) -> None:
        """It has been refused: among the first to give way."""
        if (place := self._places.get(connection)) is not None:
            self._place(connection, Standing.UNPROVEN, place[1])

    def remove(self, connection: T) -> None:
        """Forget a connection; nothing happens when it is not known."""
        standing, client = self._places.pop(connection, (None, ""))
        if standing is None:
            return
        self._num_of[client] -= 1
        if not self._num_of[client]:
            del self._num_of[client]
        if standing != Standing.BUSY:
            del self._idle[standing][client][connection]
            if not self._idle[standing][client]:
                del self._idle[standing][client]

    def _place(self, connection: T, standing: Standing, client: str) -> None:
        self.remove(connection)
        self._places[connection] = standing, client
        self._num_of[client] += 1
        if standing != Standing.BUSY:
            self._idle[standing].setdefault(client, {})[connection] = None


class ByteShares:
    """Bytes that connections hold, with a bound for all of them. what, limit: what errors call these."""

    def __init__(self, what: str, limit: str, max_bytes: int) -> None:
        self._what, self._limit, self._max_bytes = what, limit, max_bytes
        self._held: dict[AdmittedConnection, int] = {}  # the youngest last
        self.num_bytes = 0

    def hold(self, member: AdmittedConnection, num_bytes: int) -> None:
        """Note that `member` holds that much from now on."""
        self.num_bytes += num_bytes - self._held.pop(member, 0)
        if num_bytes:
            self._held[member] = num_bytes

    def make_room(self, member: AdmittedConnection) -> None:
        """Have connections give way until all bytes are within the bound.

        They are the client's that holds most: `member` itself if it is that client's, else its youngest.
        """
        while self.num_bytes > self._max_bytes and not member.is_ending:
            totals: Counter[str] = Counter()
            for holder, num_bytes in self._held.items():
                totals[holder.client_name] += num_bytes
            largest = max(totals, key=totals.__getitem__)
            of_largest = (holder for holder in reversed(self._held) if holder.client_name == largest)
            victim = member if member.client_name == largest else next(of_largest)
            held = f"{self.num_bytes} bytes under way, {totals[largest]} of them yours"
            victim.give_way(
                overloaded(f"{self._what}: {held}, expected at most {self._max_bytes} ({self._limit})")
            )


class ClientTurns:
    """Work on requests: a few pieces in each pass of the event loop, clients in turn.

    One of many connections, or of many requests behind each other, would have all others wait for a pass in
    which each of its requests is answered, and a request takes several passes.
    """

    def __init__(self, most_a_pass: int) -> None:
        self._most_a_pass = most_a_pass
        self._waiting: OrderedDict[str, deque[Callable[[], bool]]] = OrderedDict()  # the next client first
        self._num_begun = 0  # in this pass
        self._is_awaiting_pass = False

    def add(self, client: str, begin: Callable[[], bool]) -> None:
        """Call `begin` now or in its turn. It returns False if there was nothing to do any more."""
        self._waiting.setdefault(client, deque()).append(begin)
        self._begin()

    async def wait(self, client: str) -> None:
        """Until it is this client's turn."""
        turn = asyncio.Event()
        self.add(client, lambda: turn.set() is None)
        await turn.wait()

    def _begin_pass(self) -> None:
        self._num_begun, self._is_awaiting_pass = 0, False
        if self._waiting:
            self._begin()

    def _begin(self) -> None:
        if not self._is_awaiting_pass:
            self._is_awaiting_pass = True
            asyncio.get_running_loop().call_soon(self._begin_pass)
        while self._waiting and self._num_begun < self._most_a_pass:
            client, beginnings = next(iter(self._waiting.items()))
            begin = beginnings.popleft()
            if beginnings:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            self._num_begun += begin()


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
        self.headers = ByteShares("headers", "max_total_header_bytes", limits.max_total_header_bytes)
        max_body_bytes = max(limits.max_total_body_bytes, limits.max_body_bytes)
        self.bodies = ByteShares("bodies", "max_total_body_bytes", max_body_bytes)
        self.beginnings = ClientTurns(_BEGINNINGS_A_TURN)
        self.handshakes = ClientTurns(1)
        self.unpackings = ClientTurns(1)
        self._trimming: asyncio.TimerHandle | None = None
        self._large_readers: deque[AdmittedConnection] = deque()  # none of them reads

    def take_place(self, connection: AdmittedConnection) -> bool:
        """True when there is a place for it, which an idle connection may have had to give."""
        victim = self.connections.add(connection, connection.client_name)
        if victim is not None and victim is not connection:
            victim.close_now()
        return victim is not connection

    def hold(self, connection: AdmittedConnection, num_header_bytes: int, num_body_bytes: int) -> None:
        """Note what is stored of a connection's requests."""
        self.headers.hold(connection, num_header_bytes)
        self.bodies.hold(connection, num_body_bytes)

    def make_room(self, connection: AdmittedConnection) -> None:
        """Have connections give way where it is too much for all."""
        self.headers.make_room(connection)
        self.bodies.make_room(connection)

    def release(self, connection: AdmittedConnection) -> None:
        """It has been given its last answer: others have its room."""
        self.hold(connection, 0, 0)
        self.connections.demote(connection)

    def wait_for_turn(self, reader: AdmittedConnection) -> None:
        """It has read much at once, and stopped: it reads on in its turn.

        A few read in each pass of the event loop, so that a small request, which takes several passes, waits
        for a few large reads and not for one of each upload under way.
        """
        self._large_readers.append(reader)
        if len(self._large_readers) == 1:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        for _ in range(min(_READERS_A_TURN, len(self._large_readers))):
            self._large_readers.popleft().continue_reading()
        if self._large_readers:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def note_ended(self, body_bytes: int) -> None:
        """A request has been answered, or its client has left: soon its memory goes back to the kernel.

        malloc keeps it for the next ones.
        """
        if body_bytes >= LARGE_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, trim_heap)
