"""What a client of another machine may not do, and is not told. Pure: network_listener.py has sockets.

It is known by its identity, which begins as none of this machine's does. What only those may who share the
machine and the user is done by signals and files, and cannot come over a socket at all.
"""

from __future__ import annotations

import math

import msgspec

from ...ipc.daemon.daemon_state import SUPERVISOR_ROLE
from ...ipc.messages import EngineCoreRequest, EngineFacts, Hello, UtilityCall, UtilityMethod, UtilityResult
from ...ipc.network.served_files import ServedFiles

_REMOTE = b"tcp:"
_CALLS = frozenset(
    {
        UtilityMethod.PING,
        UtilityMethod.STATS,
        UtilityMethod.SNAPSHOT,
        UtilityMethod.METRICS,
        UtilityMethod.CHECK_INTEGRITY,
        UtilityMethod.DIGEST,
    }
)


def to_remote_identity(identity: bytes) -> bytes:
    """What a client is known by whose identity at the network's ROUTER is this."""
    return _REMOTE + identity


def to_socket_identity(identity: bytes) -> bytes:
    """The reverse."""
    return identity[len(_REMOTE) :]


def is_remote(identity: bytes) -> bool:
    """Whether a client has come over the network."""
    return identity.startswith(_REMOTE)


def find_refusal(hello: Hello) -> str | None:
    """Why a remote client is not served, None if it is."""
    if hello.client_kind == SUPERVISOR_ROLE:
        return f"a client of the network may not be the {SUPERVISOR_ROLE}"
    return None


def refuse_call(call: UtilityCall) -> UtilityResult | None:
    """The answer to a call that would change what other clients get, None if the call is allowed."""
    if call.method in _CALLS:
        return None
    return UtilityResult(call.call_id, f"{call.method.name} is only for clients on the engine's machine")


def adapt_request(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request as if it came at this moment, or by its age: the other machine's clock must not decide on
    its place in the queue. For a time that is not finite the core takes its own clock.
    """
    return msgspec.structs.replace(request, arrival_time=math.inf)


def to_remote_facts(facts: EngineFacts, files: ServedFiles | None) -> EngineFacts:
    """Without paths of this machine, with what the files there hold."""
    tokenizer = "remote" if facts.tokenizer else ""
    return msgspec.structs.replace(facts, model="remote", tokenizer=tokenizer, files=files)
