"""Origin: what the core believes of a client, and what it tells it, by where the client comes from.

A local client is believed and told everything. A remote one comes by another listener (core/network): its
identity has a prefix that no local one has, then its key, and has an Origin of its own. What only local users
may do goes by signals and files, and cannot come over a socket.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

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
    """The core's identity of a client with this key and this identity at the network's ROUTER."""
    return _REMOTE + key + identity


def to_socket_identity(identity: bytes) -> bytes:
    """The reverse of `to_remote_identity`."""
    return identity[_KEY_END:]


def is_remote(identity: bytes) -> bool:
    """Whether a client has come over the network."""
    return identity.startswith(_REMOTE)


def find_key(identity: bytes) -> bytes:
    """The key of a client of the network."""
    return identity[len(_REMOTE) : _KEY_END]


def name_scope(identity: bytes) -> str:
    """The prefix of the owners of a remote client's requests; '' for a local client, which names owners."""
    return identity[:_KEY_END].decode() + "/" if is_remote(identity) else ""


def scope_salt(salt: str, scope: str) -> str:
    """A cache_salt that no client of another scope can have."""
    return scope.ljust(_SALT_START, "/") + salt


def read_client_salt(request_salt: str, scope: str) -> str:
    """The cache_salt as the client has sent it: the reverse of `scope_salt`; '' is the local scope."""
    return request_salt[_SALT_START:] if scope else request_salt


def make_owner_test(scope: str, tenant: str = "") -> Owns:
    """Tests whether a scope's clients may see and abort an owner's requests; with `tenant` only its own."""
    if tenant:
        return (scope + tenant).__eq__
    return lambda owner: owner.startswith(scope)


class Origin:
    """A local client's. Others override what they do not believe or do not tell."""

    standing = Standing.LOCAL
    scope = ""  # as `name_scope`

    def adapt_hello(self, hello: Hello) -> Hello:
        """The Hello with what the core believes of it. Raises DaemonError if the client is not served."""
        return hello

    def find_share(self, hello: Hello) -> ClientShare:
        """The client's share of the engine."""
        return ClientShare(hello.weight)

    def adapt_facts(self, facts: EngineFacts) -> EngineFacts:
        """What the client is told of the engine's facts."""
        return facts

    def adapt_request(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request with what the core believes of it."""
        return request

    def adapt_result(self, _method: UtilityMethod, result: UtilityResult, /) -> UtilityResult:
        """What the client is told of the answer to a utility call."""
        return result

    def adapt_told(self, message: msgspec.Struct) -> msgspec.Struct:
        """Any message to it, as it is told."""
        return message

    def note_added(self, request_id: str, queued_time: float) -> None:
        """The core has admitted a request of the client."""

    def note_ended(self, request_id: str) -> None:
        """A request of the client was answered."""

    def note_lost(self, request_ids: Iterable[str]) -> None:
        """The client is gone, with these requests."""
