"""What the core makes of clients of other machines: of what they say, and of what they are told.

Pure: network_listener.py has sockets, and ipc/protocol/rights.py the table of who may what. Such a client
is known by its identity, which begins as none of this machine's does and has its key. What only those may
who share the machine and the user is done by signals and files, and cannot come over a socket at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...ipc.daemon.daemon_state import SUPERVISOR_ROLE
from ...ipc.network.keys import KEY_LENGTH, ClientGrant
from ...ipc.network.served_files import ServedFiles
from ...ipc.protocol.engine_views import Owns, hide_others, hide_stall
from ...ipc.protocol.messages import (
    MAX_CACHE_SALT_LENGTH,
    EngineCoreRequest,
    EngineFacts,
    Hello,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.protocol.rights import HELLO_FIELDS, REQUEST_FIELDS, UTILITIES, Belief, Reach, Standing
from ..scheduling.tenant import ClientShare
from .request_memory import PastLife

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


def find_standing(identity: bytes, owner: bytes) -> Standing:
    """What kind of client this is; `owner` is the identity of the engine's owner, if it has one."""
    if is_remote(identity):
        return Standing.NETWORK
    return Standing.OWNER if owner and identity == owner else Standing.LOCAL


def find_key(identity: bytes) -> bytes:
    """The key of a client of the network."""
    return identity[len(_REMOTE) : _KEY_END]


def name_scope(identity: bytes) -> str:
    """What the owners of this client's requests begin with; '' of a local one, which says owners itself."""
    return identity[:_KEY_END].decode() + "/" if is_remote(identity) else ""


def make_owner_test(identity: bytes, tenant: str = "") -> Owns:
    """Whether a request is this client's to see and to end by name, and of this tenant if one is given."""
    scope = name_scope(identity)
    if tenant:
        return (scope + tenant).__eq__
    return lambda owner: owner.startswith(scope)


def find_refusal(hello: Hello) -> str | None:
    """Why a remote client is not served, None if it is."""
    if hello.client_kind == SUPERVISOR_ROLE:
        return f"a client of the network may not be the {SUPERVISOR_ROLE}"
    return None


def adapt_hello(hello: Hello, grant: ClientGrant) -> Hello:
    """The Hello with what the table does not take from a client of the network in its key's words."""
    values = {name: _HELLO_VALUES[name](grant) for name in _list_replaced(HELLO_FIELDS)}
    return msgspec.structs.replace(hello, **values)


def adapt_request(
    request: EngineCoreRequest, identity: bytes, grant: ClientGrant, past: PastLife
) -> EngineCoreRequest:
    """The request with what the table does not take from a client of the network in the core's own words.

    `past`: what the core knows itself of the request.
    """
    said = _Said(request, name_scope(identity), grant, past)
    values = {name: _REQUEST_VALUES[name](said) for name in _list_replaced(REQUEST_FIELDS)}
    return msgspec.structs.replace(request, **values)


def adapt_result(result: UtilityResult, method: UtilityMethod, owns: Owns) -> UtilityResult:
    """The answer to a call without what is of others' requests; a digest has none of them already."""
    if UTILITIES[method].network is not Reach.OWN:
        return result
    values: dict[str, Any] = {}
    if result.stats is not None:
        values["stats"] = hide_stall(result.stats, owns)
    if result.metrics is not None:
        values["metrics"] = msgspec.structs.replace(
            result.metrics, stats=hide_stall(result.metrics.stats, owns)
        )
    if result.snapshot is not None:
        values["snapshot"] = hide_others(result.snapshot, owns)
    if method is UtilityMethod.CHECK_INTEGRITY and result.error is not None:
        values["error"] = "there are problems, which clients on the engine's machine are told"
    return msgspec.structs.replace(result, **values)


def _list_replaced(fields: Mapping[str, Belief]) -> list[str]:
    return [name for name, belief in fields.items() if belief is not Belief.TAKEN]


def find_share(identity: bytes, hello: Hello, grant: ClientGrant) -> ClientShare:
    """What a client that has said Hello has of the engine."""
    if not is_remote(identity):
        return ClientShare(hello.weight)
    tenant = None if grant.may_name_tenants else name_scope(identity)
    return ClientShare(hello.weight, tenant, is_bounded=True)


def read_said_salt(request_salt: str, scope: str) -> str:
    """The cache_salt as the client has said it."""
    return request_salt[_SALT_START:] if scope else request_salt


@dataclass(frozen=True, slots=True)
class _Said:
    """A request of a client of the network, with what is known of both."""

    request: EngineCoreRequest
    scope: str
    grant: ClientGrant
    past: PastLife


# Of each field that is not simply taken: what is put in its place.
_HELLO_VALUES: dict[str, Callable[[ClientGrant], Any]] = {"weight": lambda grant: grant.weight}
_REQUEST_VALUES: dict[str, Callable[[_Said], Any]] = {
    # For a time that is not finite the core takes its own clock, less the age.
    "arrival_time": lambda said: math.inf if said.past.arrival is None else said.past.arrival,
    "age_s": lambda _: 0.0,
    "priority": lambda said: max(said.request.priority, said.grant.priority),
    "cache_salt": lambda said: said.scope.ljust(_SALT_START, "/") + said.request.cache_salt,
    "tenant": lambda said: said.scope + said.request.tenant,
    "num_attempts": lambda said: min(said.request.num_attempts, said.past.num_attempts),
}


def to_remote_facts(facts: EngineFacts, files: ServedFiles | None) -> EngineFacts:
    """Without paths of this machine, with what the files there hold."""
    tokenizer = "remote" if facts.tokenizer else ""
    return msgspec.structs.replace(facts, model="remote", tokenizer=tokenizer, files=files)
