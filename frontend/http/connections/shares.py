"""Who gives way when a process is full: shares of connections and of stored bytes. Knows no sockets.

A client is a text: the hash of its API key once it has shown one, else its address. Members are connections;
the methods answer who has to go, and the caller lets it go.
"""

from __future__ import annotations

import socket
from enum import IntEnum
from typing import Generic, TypeVar

_NOTHING = "", 0
_NETWORK_BYTES = 8  # of an IPv6 address: one customer has the rest to choose from

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


def name_address(host: str) -> str:
    """The client that an address stands for: an IPv4 address, an IPv6 network of 64 bits, '' without one."""
    if ":" not in host or host.startswith("::ffff:"):  # the latter is IPv4 on a socket for both
        return host
    try:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:_NETWORK_BYTES].hex(":", 2)
    except OSError:
        return host
