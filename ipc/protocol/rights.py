"""Who may say what: the one table that the core, HTTP and gRPC ask. It knows no sockets and no requests.

A row says what each kind of caller reaches by a message, a call, a route or a method, and which fields of
Hello, EngineCoreRequest and RequestOptions are taken from whom. What is not in it is nobody's: a new message,
call, route or field works for no one until it has its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

import msgspec

from .messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequests,
    EngineDead,
    EngineRoster,
    FrontendCounts,
    Goodbye,
    Hello,
    LeaseCheck,
    ProtocolNotice,
    Refusal,
    StartupProgress,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
    WorkerStatus,
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


class Belief(Enum):
    """What becomes of a field that a network client has filled in."""

    TAKEN = "taken"  # it decides about the client's own request
    KEY = "by its key"  # the operator's key file decides, or the key's own name is put in
    CORE = "by the core"  # the core puts in, or bounds it by, what it knows itself


@dataclass(frozen=True, slots=True)
class EngineRight:
    """Of a message to the engine, or a utility call."""

    local: Reach
    network: Reach
    owner: Reach = Reach.NONE

    def find(self, standing: Standing) -> Reach:
        """What this kind of client reaches by it."""
        match standing:
            case Standing.OWNER:
                return max(self.owner, self.local)  # it is of this machine and user
            case Standing.LOCAL:
                return self.local
            case Standing.NETWORK:
                return self.network
            case _:
                return Reach.NONE


@dataclass(frozen=True, slots=True)
class ServerRight:
    """Of a route of HTTP, or a method of gRPC. Callers without a key are known by their address."""

    key: Reach
    keyless: Reach
    stranger: Reach = Reach.NONE

    def find(self, standing: Standing) -> Reach:
        """What this kind of caller reaches by it."""
        match standing:
            case Standing.KEY:
                return self.key
            case Standing.KEYLESS:
                return self.keyless
            case Standing.STRANGER:
                return self.stranger
            case _:
                return Reach.NONE


@dataclass(frozen=True, slots=True)
class OptionRight:
    """Of a field of RequestOptions. is_callers: a body of HTTP or gRPC may say it, else the server does."""

    network: Belief
    is_callers: bool = False


_NOBODY = EngineRight(Reach.NONE, Reach.NONE)
_OWN_REQUESTS = EngineRight(Reach.ALL, Reach.OWN)
_FACTS = EngineRight(Reach.COUNTS, Reach.COUNTS)
_LOCAL_ONLY = EngineRight(Reach.ALL, Reach.NONE)

MESSAGES: dict[type[msgspec.Struct], EngineRight] = {
    Hello: _FACTS,
    Goodbye: EngineRight(Reach.OWN, Reach.OWN),
    EngineCoreRequest: EngineRight(Reach.OWN, Reach.OWN),
    EngineCoreRequests: EngineRight(Reach.OWN, Reach.OWN),
    AbortRequests: _OWN_REQUESTS,  # by names; ids are the sender's own for everybody
    FrontendCounts: _FACTS,  # of a client of the network as much as it was served
    UtilityCall: _OWN_REQUESTS,  # and as the method says
    EngineRoster: EngineRight(Reach.NONE, Reach.NONE, owner=Reach.ALL),
    # The engine's own words, which it takes from nobody.
    Welcome: _NOBODY,
    Refusal: _NOBODY,
    StartupProgress: _NOBODY,
    EngineCoreOutputs: _NOBODY,
    UtilityResult: _NOBODY,
    EngineDead: _NOBODY,
    ProtocolNotice: _NOBODY,
    LeaseCheck: _NOBODY,
    WorkerStatus: _NOBODY,
}

UTILITIES: dict[UtilityMethod, EngineRight] = {
    UtilityMethod.PING: _FACTS,
    UtilityMethod.STATS: _OWN_REQUESTS,  # counts, and the id of a request that stalls
    UtilityMethod.METRICS: _OWN_REQUESTS,  # likewise
    UtilityMethod.SNAPSHOT: _OWN_REQUESTS,
    UtilityMethod.DIGEST: _OWN_REQUESTS,  # names of the beginnings of prompts
    UtilityMethod.CHECK_INTEGRITY: _OWN_REQUESTS,  # whether there are problems; in words to whom all may see
    UtilityMethod.RESET_PREFIX_CACHE: _LOCAL_ONLY,
    UtilityMethod.START_PROFILE: _LOCAL_ONLY,
    UtilityMethod.STOP_PROFILE: _LOCAL_ONLY,
}

# What is believed of a network client; a local user's fields are all taken.
HELLO_FIELDS: dict[str, Belief] = {
    "protocol_version": Belief.TAKEN,
    "client_kind": Belief.TAKEN,  # for people: never the supervisor's, which the core checks
    "pid": Belief.TAKEN,  # for people
    "weight": Belief.KEY,
    "number": Belief.TAKEN,
}
REQUEST_FIELDS: dict[str, Belief] = {
    "request_id": Belief.TAKEN,
    "prompt_token_ids": Belief.TAKEN,
    "sampling_params": Belief.TAKEN,
    "arrival_time": Belief.CORE,  # when it came here, or to the core before
    "eos_token_ids": Belief.TAKEN,
    "output_token_ids": Belief.TAKEN,
    "options": Belief.KEY,  # each as REQUEST_OPTIONS says
    "token_lists": Belief.TAKEN,
    "is_resumed": Belief.TAKEN,  # up to twice the bounds of what may wait
    "num_attempts": Belief.CORE,  # at most the cores that are known to have ended with it live
    "grammar": Belief.TAKEN,
    "extra_args": Belief.TAKEN,
    "beam_search": Belief.TAKEN,
    "purpose": Belief.TAKEN,
    "pooling_params": Belief.TAKEN,
    "type_start": Belief.TAKEN,
    "age_s": Belief.CORE,  # none: as arrival_time
    "num_sequences": Belief.TAKEN,  # for counts
}

REQUEST_OPTIONS: dict[str, OptionRight] = {
    "priority": OptionRight(Belief.KEY, True),  # after others as it likes, before them only as its key may
    "cache_salt": OptionRight(Belief.KEY, True),  # keys share no cached blocks: speed tells what is cached
    "tenant": OptionRight(Belief.KEY),
    "timeout_s": OptionRight(Belief.TAKEN, True),
    "queue_timeout_s": OptionRight(Belief.TAKEN, True),
    "names": OptionRight(Belief.TAKEN),  # of its own key: nobody else's abort finds them
}
CALLER_OPTIONS = [name for name, right in REQUEST_OPTIONS.items() if right.is_callers]

_ASK = ServerRight(Reach.OWN, Reach.OWN)
_OPEN = ServerRight(Reach.OWN, Reach.OWN, Reach.COUNTS)
_TOLD = ServerRight(Reach.COUNTS, Reach.COUNTS)

ROUTES: dict[str, ServerRight] = {
    # Whether the server is up; /health names a request that gets no token to its own caller.
    "/live": _OPEN,
    "/ready": _OPEN,
    "/health": _OPEN,
    "/ping": _TOLD,
    # What it is.
    "/": _TOLD,
    "/docs": _TOLD,
    "/openapi.json": _TOLD,
    "/version": _TOLD,
    "/v1/models": _TOLD,
    "/v1/models/{model:path}": _TOLD,
    "/info": _TOLD,
    "/server_info": _TOLD,
    "/tokenizer_info": _TOLD,
    "/load": _TOLD,
    "/metrics": _TOLD,
    # Live views.
    "/stats": _ASK,
    "/stats/stream": _ASK,
    # Requests.
    "/v1/completions": _ASK,
    "/v1/chat/completions": _ASK,
    "/v1/responses": _ASK,
    "/v1/messages": _ASK,
    "/v1/messages/count_tokens": _ASK,
    "/v1/embeddings": _ASK,
    "/v2/embed": _ASK,
    "/embed": _ASK,
    "/similarity": _ASK,
    "/rerank": _ASK,
    "/v1/rerank": _ASK,
    "/v2/rerank": _ASK,
    "/score": _ASK,
    "/v1/score": _ASK,
    "/classify": _ASK,
    "/pooling": _ASK,
    "/tokenize": _ASK,
    "/detokenize": _ASK,
    "/invocations": _ASK,
    # Requests that were asked for before.
    "/abort_requests": _ASK,
    "/v1/responses/{response_id}": _ASK,
    "/v1/responses/{response_id}/cancel": _ASK,
    "/v1/responses/{response_id}/input_items": _ASK,
}

METHODS: dict[str, ServerRight] = {
    "/quire.grpc.engine.QuireEngine/Generate": _ASK,
    "/quire.grpc.engine.QuireEngine/GenerateStream": _ASK,
    "/quire.grpc.engine.QuireEngine/Abort": _ASK,
    "/quire.grpc.engine.QuireEngine/ListModels": _TOLD,
    "/grpc.health.v1.Health/Check": ServerRight(Reach.COUNTS, Reach.COUNTS, Reach.COUNTS),
    "/grpc.health.v1.Health/Watch": _TOLD,
}


def check_route(path: str) -> None:
    """AssertionError for a route or a method that nobody has rights to."""
    assert path in ROUTES or path in METHODS, f"{path} has no row in ipc/protocol/rights.py"


def find_reach(path: str, standing: Standing) -> Reach:
    """What a caller reaches by a route or a method; NONE of one that has no row."""
    right = ROUTES.get(path) or METHODS.get(path)
    return Reach.NONE if right is None else right.find(standing)
