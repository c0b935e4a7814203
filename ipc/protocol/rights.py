"""Who may say what: the one table that the core, HTTP and gRPC ask. It knows no sockets and no requests.

A row says what each kind of caller reaches by a message, a call, a route or a method, and from whom a field
of RequestOptions is taken. What is not in it is nobody's: a new message, call, route or option works for no
one until it has its row.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec

from .messages import (
    AbortRequests,
    EngineCoreRequest,
    EngineCoreRequests,
    EngineRoster,
    FrontendCounts,
    Goodbye,
    Hello,
    UtilityCall,
    UtilityMethod,
)


class Standing(Enum):
    """Who says something, and by what that is known."""

    OWNER = "the supervisor"  # of the engine: the identity of its link, which those two alone know
    LOCAL = "a local user"  # a Unix socket in the user's own folder: whose daemon it is
    NETWORK = "a network client"  # a CURVE key that the operator's file lets in
    KEY = "an API key"
    KEYLESS = "anybody, of a server without keys"  # by the server that it asks, and its address
    STRANGER = "nobody"  # without one of a server's keys


class Reach(IntEnum):
    """Whose requests somebody sees, or ends, by what a row names. Each includes those before."""

    NONE = 0  # it is refused
    COUNTS = 1  # nobody's: facts of the engine and the server, and numbers without names
    OWN = 2  # its own; of all others it gets counts, and the answer for what does not exist
    ALL = 3


class Right(dict[Standing, Reach]):
    """What callers reach by a message, a call, a route or a method. Who is not named reaches nothing."""

    def find(self, standing: Standing) -> Reach:
        """What this kind of caller reaches by it."""
        return self.get(standing, Reach.NONE)


class OptionRight(NamedTuple):
    """Of a field of RequestOptions.

    is_taken: a client of the network decides on it, else its key does: the operator's file, or its own name.
    is_callers: a body of HTTP or gRPC may say it, else the server does.
    """

    is_taken: bool
    is_callers: bool


def _make_engine_right(local: Reach, network: Reach) -> Right:
    """Of a message to the engine, or a utility call. Its owner is of this machine and user."""
    return Right({Standing.OWNER: local, Standing.LOCAL: local, Standing.NETWORK: network})


def _make_server_right(caller: Reach, stranger: Reach = Reach.NONE) -> Right:
    """Of a route of HTTP, or a method of gRPC. Callers without a key are known by their address."""
    return Right({Standing.KEY: caller, Standing.KEYLESS: caller, Standing.STRANGER: stranger})


_OWN = _make_engine_right(Reach.OWN, Reach.OWN)
_OWN_REQUESTS = _make_engine_right(Reach.ALL, Reach.OWN)
_FACTS = _make_engine_right(Reach.COUNTS, Reach.COUNTS)
_LOCAL_ONLY = _make_engine_right(Reach.ALL, Reach.NONE)

# What the engine takes; its own words it takes from nobody.
MESSAGES: dict[type[msgspec.Struct], Right] = {
    Hello: _FACTS,
    Goodbye: _OWN,
    EngineCoreRequest: _OWN,
    EngineCoreRequests: _OWN,
    AbortRequests: _OWN_REQUESTS,  # by names; ids are the sender's own for everybody
    FrontendCounts: _FACTS,  # of a client of the network as much as it was served
    UtilityCall: _OWN_REQUESTS,  # and as the method says
    EngineRoster: Right({Standing.OWNER: Reach.ALL}),
}

UTILITIES: dict[UtilityMethod, Right] = {
    UtilityMethod.PING: _FACTS,
    UtilityMethod.STATS: _OWN_REQUESTS,  # counts, and the id of a request that stalls
    UtilityMethod.METRICS: _OWN_REQUESTS,  # likewise
    UtilityMethod.SNAPSHOT: _OWN_REQUESTS,
    UtilityMethod.HISTORY: _FACTS,
    UtilityMethod.DIGEST: _OWN_REQUESTS,  # names of the beginnings of prompts
    UtilityMethod.CHECK_INTEGRITY: _OWN_REQUESTS,  # whether there are problems; in words to whom all may see
    UtilityMethod.RESET_PREFIX_CACHE: _LOCAL_ONLY,
    UtilityMethod.START_PROFILE: _LOCAL_ONLY,
    UtilityMethod.STOP_PROFILE: _LOCAL_ONLY,
}

REQUEST_OPTIONS: dict[str, OptionRight] = {
    # After others as it likes, before them only as its key may.
    "priority": OptionRight(is_taken=False, is_callers=True),
    # Keys share no cached blocks: speed tells what is cached.
    "cache_salt": OptionRight(is_taken=False, is_callers=True),
    "tenant": OptionRight(is_taken=False, is_callers=False),
    "timeout_s": OptionRight(is_taken=True, is_callers=True),
    "queue_timeout_s": OptionRight(is_taken=True, is_callers=True),
    # Of its own key: nobody else's abort finds them.
    "names": OptionRight(is_taken=True, is_callers=False),
}
CALLER_OPTIONS = [name for name, right in REQUEST_OPTIONS.items() if right.is_callers]

_ASK = _make_server_right(Reach.OWN)
_OPEN = _make_server_right(Reach.OWN, Reach.COUNTS)
_TOLD = _make_server_right(Reach.COUNTS)

ROUTES: dict[str, Right] = {
    # Whether the server is up; /health names a request that gets no token to its own caller.
    **dict.fromkeys(("/live", "/ready", "/health"), _OPEN),
    # The page and its libraries are the same for all; it asks for a key itself.
    **dict.fromkeys(("/", "/vendor/highlight.min.js", "/vendor/katex.min.js"), _OPEN),
    # What it is.
    **dict.fromkeys(
        (
            *("/ping", "/openapi.json", "/version", "/v1/models", "/v1/models/{model:path}"),
            *("/info", "/server_info", "/tokenizer_info", "/load", "/metrics", "/stats/history"),
            *("/api/tags", "/api/ps", "/api/show", "/api/version", "/api/pull"),
            *("/api/create", "/api/copy", "/api/delete", "/api/push"),
        ),
        _TOLD,
    ),
    **dict.fromkeys(
        (
            # Live views.
            *("/stats", "/stats/stream"),
            # Requests.
            *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations"),
            *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
            *("/v1/embeddings", "/v2/embed", "/embed", "/similarity", "/classify", "/pooling"),
            *("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
            *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
            # Requests that were asked for before.
            *("/abort_requests", "/v1/responses/{response_id}"),
            *("/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
        ),
        _ASK,
    ),
}

METHODS: dict[str, Right] = {
    "/quire.grpc.engine.QuireEngine/Generate": _ASK,
    "/quire.grpc.engine.QuireEngine/GenerateStream": _ASK,
    "/quire.grpc.engine.QuireEngine/Abort": _ASK,
    "/quire.grpc.engine.QuireEngine/ListModels": _TOLD,
    "/grpc.health.v1.Health/Check": _make_server_right(Reach.COUNTS, Reach.COUNTS),
    "/grpc.health.v1.Health/Watch": _TOLD,
}


def check_route(path: str) -> None:
    """AssertionError for a route or a method that nobody has rights to."""
    assert path in ROUTES or path in METHODS, f"{path} has no row in ipc/protocol/rights.py"


def list_open() -> list[str]:
    """Routes and methods that answer callers without one of the server's keys."""
    rights = (ROUTES | METHODS).items()
    return [path for path, right in rights if right.find(Standing.STRANGER) is not Reach.NONE]


def find_reach(path: str, standing: Standing) -> Reach:
    """What a caller reaches by a route or a method; NONE of one that has no row."""
    right = ROUTES.get(path) or METHODS.get(path)
    return Reach.NONE if right is None else right.find(standing)
