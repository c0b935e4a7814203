"""What the connections of one process share: their places, their bytes, who may come in."""

from __future__ import annotations

from typing import Protocol

from ..errors import ApiError, overloaded
from ..limits import Limits
from ..observe.access_log import AccessLog
from .auth import ApiKeys
from .hosts import AllowedHosts
from .memory import MemoryTrimmer
from .read_turns import ReadTurns
from .shares import ByteShares, ConnectionTable


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


class Admission:
    """What the connections of one process share: its limits, keys and room.

    body_paths: where a POST has a body; that of any other request is not stored. root_path: what is taken
    away from the beginning of paths. hosts: whom requests have to be for; None: whoever they name.
    """

    def __init__(
        self,
        limits: Limits,
        keys: ApiKeys,
        body_paths: frozenset[str],
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
