"""Where a client comes from: by what it is known, what of it is believed, and what it is told.

A client of this machine is believed and told everything. One of another machine comes by a listener of its
own (core/network): its identity begins as none of this machine's does, with its key, and has its own Origin.
What only those may who share the machine and the user is done by signals and files, never over a socket.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import msgspec
import zmq

from ...ipc.network.keys import KEY_LENGTH
from ...ipc.params.request_options import MAX_CACHE_SALT_LENGTH
from ...ipc.protocol.engine_views import Owns
from ...ipc.protocol.messages import (
    EngineCoreRequest,
    EngineFacts,
    Hello,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.protocol.rights import Standing
from ..scheduling.tenant import ClientShare

_REMOTE = b"tcp:"
_KEY_END = len(_REMOTE) + KEY_LENGTH
_SALT_START = MAX_CACHE_SALT_LENGTH + 1  # no client of this machine can say a salt as long as these


def to_remote_identity(identity: bytes, key: bytes) -> bytes:
    """What a client with this key is known by whose identity at the network's ROUTER is this."""
    return _REMOTE + key + identity


def to_socket_identity(identity: bytes) -> bytes:
    """The reverse."""
    return identity[_KEY_END:]


def is_remote(identity: bytes) -> bool:
    """Whether a client has come over the network."""
    return identity.startswith(_REMOTE)


def find_key(identity: bytes) -> bytes:
    """The key of a client of the network."""
    return identity[len(_REMOTE) : _KEY_END]


def name_scope(identity: bytes) -> str:
    """What the owners of this client's requests begin with; '' of a local one, which says owners itself."""
    return identity[:_KEY_END].decode() + "/" if is_remote(identity) else ""


def scope_salt(salt: str, scope: str) -> str:
    """A cache_salt that no other scope can say."""
    return scope.ljust(_SALT_START, "/") + salt


def read_said_salt(request_salt: str, scope: str) -> str:
    """The cache_salt as the client has said it: the reverse of `scope_salt`, '' being nobody's scope."""
    return request_salt[_SALT_START:] if scope else request_salt


def make_owner_test(scope: str, tenant: str = "") -> Owns:
    """Whether a request is this scope's to see and to end by name, and of this tenant if one is given."""
    if tenant:
        return (scope + tenant).__eq__
    return lambda owner: owner.startswith(scope)


class Origin:
    """Of one client; this one is of this machine. Others override what they do not believe or do not tell."""

    standing = Standing.LOCAL
    scope = ""  # as `name_scope`

    def adapt_hello(self, hello: Hello) -> Hello:
        """The Hello as it counts. Raises DaemonError, with why the client is not served."""
        return hello

    def find_share(self, hello: Hello) -> ClientShare:
        """What a client that has said this has of the engine."""
        return ClientShare(hello.weight)

    def adapt_facts(self, facts: EngineFacts) -> EngineFacts:
        """The engine's facts as it is told them."""
        return facts

    def adapt_request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """A request as it counts."""
        return request

    def adapt_result(self, _method: UtilityMethod, result: UtilityResult, /) -> UtilityResult:
        """The answer to a utility call as it is told."""
        return result

    def adapt_told(self, message: msgspec.Struct) -> msgspec.Struct:
        """Any message to it, as it is told."""
        return message

    def note_added(self, request_id: str, queued_time: float) -> None:
        """The core has taken a request of it on."""

    def note_ended(self, request_id: str) -> None:
        """It has been answered."""

    def note_lost(self, request_ids: Iterable[str]) -> None:
        """The client is gone with these."""


class ClientListener(ABC):
    """A bound socket that clients come to. `lost_fd` is readable when a client's connection has ended."""

    router: zmq.Socket[bytes]
    lost_fd: int

    @abstractmethod
    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """The messages that have arrived: (client, frames). The ROUTER takes clients in turn."""

    @abstractmethod
    def send(self, identity: bytes, frames: tuple[bytes]) -> None:
        """As `send_to`, to a client of `receive`."""

    def has_lost_one(self) -> bool:
        """True if a client's connection has ended since the last call."""
        try:
            return os.eventfd_read(self.lost_fd) > 0
        except BlockingIOError:
            return False

    @abstractmethod
    def stop(self) -> None:
        """Take no more clients; before the socket's context ends."""
