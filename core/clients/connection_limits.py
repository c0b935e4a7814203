"""ConnectionLimits: how many connections of the network a core holds, and which is cut where there are more.

A connection waits until its client, whose key was found good, has said something. Of those that wait the
oldest of the address that has most of them is cut: who has a key needs a few round trips, so that a crowd of
silent callers cuts itself. Knows no socket: connections are known by their descriptors.
"""

from __future__ import annotations

from collections import Counter


class ConnectionLimits:
    """The connections that stand. One thread at a time."""

    def __init__(self, max_connections: int, max_waiting: int) -> None:
        self._max_connections = max_connections
        self._max_waiting = max_waiting
        self._waiting: dict[int, str] = {}  # descriptor -> address, the oldest first
        self._per_address: Counter[str] = Counter()
        self._clients: set[int] = set()

    def accept(self, fd: int, address: str) -> int | None:
        """Somebody has come; returns the connection that is to be cut, None if there is room."""
        self.end(fd)
        self._waiting[fd] = address
        self._per_address[address] += 1
        room = min(self._max_waiting, self._max_connections - len(self._clients))
        return self._take_oldest() if len(self._waiting) > room else None

    def note_client(self, fd: int) -> None:
        """A message of a client that is let in has come over it: it is cut no more."""
        if fd in self._waiting:
            self._forget_waiting(fd)
            self._clients.add(fd)

    def end(self, fd: int) -> bool:
        """A connection has ended; returns whether it was a client's."""
        if fd in self._waiting:
            self._forget_waiting(fd)
        if fd not in self._clients:
            return False
        self._clients.remove(fd)
        return True

    def _take_oldest(self) -> int:
        ((address, _),) = self._per_address.most_common(1)
        fd = next(fd for fd, its_address in self._waiting.items() if its_address == address)
        self._forget_waiting(fd)
        return fd

    def _forget_waiting(self, fd: int) -> None:
        address = self._waiting.pop(fd)
        self._per_address[address] -= 1
        if not self._per_address[address]:
            del self._per_address[address]
