"""The protocol between frontends and the engine core (version 6).

A message is one ZeroMQ frame: a byte that names its type (`MESSAGE_TYPES`), then a msgpack body. The engine
binds one ROUTER; every frontend is a DEALER with a random identity. Each field has a cap; a frame that does
not decode costs its sender a ProtocolNotice and nobody else anything. A field that is added at the end of a
message, with a default, is left out by a side that does not know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..files.file_identity import NotedFiles
from ..network.served_files import ServedFiles
from ..params.pooling_params import PoolingParams
from ..params.request_options import (
    MAX_REQUEST_ID_LENGTH,
    MAX_TIMEOUT_S,
    NO_OPTIONS,
    RequestName,
    RequestOptions,
    Tenant,
)
from ..params.sampling_params import MAX_EXTRA_ARGS_BYTES, MAX_N, SamplingParams
from ..spec.config import RecoveryConfig
from .engine_views import EngineHistory, EngineMetrics, EngineSnapshot, SchedulerStats, StepTrace
from .fair_share import MAX_CLIENT_WEIGHT
from .prefix_digest import EngineDigest
from .token_lists import TokenLists

PROTOCOL_VERSION = 7

SUSPECT_ATTEMPTS = 2  # lost engine cores in a row after which a request runs alone
MAX_GRAMMAR_LENGTH = 256 * 1024  # characters
MAX_PROMPT_BYTES = 64 * 1024 * 1024  # 16 M token ids
MAX_IDS_PER_ABORT = 2048  # more are several messages
MAX_REQUESTS_PER_FRAME = 128  # likewise; a core takes on so many in some 3 ms
MAX_EOS_TOKEN_IDS = 1024
MAX_REASON_LENGTH = 65536
MAX_ROSTER_ENTRIES = 1024
MAX_SOCKET_NAME_LENGTH = 64

# Kinds of clients that only look; they are not counted as clients where people read it.
OBSERVER_KINDS = frozenset({"supervisor", "ps", "top", "serve"})

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH)]
PackedTokenIds = Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
Grammar = Annotated[str, Meta(max_length=MAX_GRAMMAR_LENGTH)]
ExtraArgs = Annotated[str, Meta(max_length=MAX_EXTRA_ARGS_BYTES)]
Purpose = Literal["", "tools", "thinking", "beam_search"]
Weight = Annotated[float, Meta(gt=0.0, le=MAX_CLIENT_WEIGHT)]


class FinishReason(IntEnum):
    """Why a request ended; the texts are OpenAI's and vLLM's."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4  # as repetition_detection asks

    def __str__(self) -> str:
        return self.name.lower()


class ErrorCode(IntEnum):
    """Why a request ended with FinishReason ERROR, for programs; `EngineCoreOutput.error` is for people."""

    REFUSED = 0  # it can never run here
    OUT_OF_MEMORY = 1  # a step of it alone, in its smallest part, is too large for the device's memory
    BAD_LOGITS = 2
    OVERLOADED = 3  # max_num_queued_reqs requests wait already
    QUEUE_TIMEOUT = 4  # it waited longer than its queue_timeout_s
    POISON_REQUEST = 5  # it, and no other, made steps fail or workers die
    BAD_GRAMMAR = 6  # its grammar does not compile, or goes beyond a limit as its output is generated
    BAD_VECTOR = 7  # what was pooled of it is not finite

    def __str__(self) -> str:
        return self.name.lower()


class UtilityMethod(IntEnum):
    """The calls that a frontend can make on the engine; nothing else is callable."""

    PING = 0
    STATS = 1  # -> SchedulerStats
    RESET_PREFIX_CACHE = 2
    CHECK_INTEGRITY = 3  # blocks in = blocks out; the error text lists what is wrong
    SNAPSHOT = 4  # -> EngineSnapshot
    METRICS = 5  # -> EngineMetrics
    DIGEST = 6  # -> EngineDigest; from the first one on the engine notes which prompts it has had
    START_PROFILE = 7  # from here on the engine notes its steps; an error if it does so already
    STOP_PROFILE = 8  # -> StepTrace
    HISTORY = 9  # -> EngineHistory


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """First of a connection: the client begins anew, and what the engine still held for it is dropped.

    Answered by Welcome when the engine is ready, or by Refusal; StartupProgress comes in between.
    `client_kind` and `pid` are for people who look at the engine.
    """

    protocol_version: int
    client_kind: Annotated[str, Meta(max_length=64)]
    pid: int
    weight: Weight = 1.0  # its share under the fair policy, in relation to the others'
    number: int = 0  # of this Hello; Welcome repeats it, so that one of an earlier connection is known


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend needs to know to check requests without asking again."""

    model: str
    served_model_name: str
    tokenizer: str
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    num_gpu_blocks: int
    block_size: int
    num_kv_tokens: int  # of requests of max_model_len tokens in the KV cache; 0: there is none
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    generation_config: str  # 'auto': sampling defaults come from generation_config.json in `model`
    pids: dict[str, int]  # role -> pid
    started_at: float  # wall clock, when the core process began
    startup: list[tuple[str, float]]  # (phase, seconds) of core and worker in order, from started_at to ready
    ledger: list[tuple[str, int]]  # (name, bytes) of the device's memory
    batch_variance_reason: str = ""  # why replays are not promised to be exact; '': they are
    recovery: RecoveryConfig = RecoveryConfig()  # how often it replaces what it loses
    logits_processors: tuple[str, ...] = ()  # of the engine, module:Class
    tool_call_parser: str | None = None  # what the operator chose; None: by the chat template
    reasoning_parser: str | None = None
    tasks: tuple[str, ...] = ("generate",)  # what it computes: that, PoolingParams.task, and "score"
    embedding_size: int = 0  # numbers of a whole embedding; 0: there are none
    is_matryoshka: bool = False  # whether an embedding may be cut to PoolingParams.dimensions
    matryoshka_dimensions: tuple[int, ...] = ()  # to one of these; empty: to any number up to embedding_size
    num_labels: int = 0  # numbers of a classifier's answer; 0: it is none
    has_token_types: bool = False  # whether EngineCoreRequest.type_start means something to the model
    files: ServedFiles | None = None  # of the model that frontends read; only told over the network
    noted: NotedFiles | None = None  # the same as this machine's disk has them, which is told to its clients
    chat_template: str | None = None  # what the operator chose in place of the tokenizer's
    served_model_aliases: tuple[str, ...] = ()  # more names that requests may have for it
    tensor_parallel_size: int = 1  # ranks of each stage
    pipeline_parallel_size: int = 1  # stages
    attention_backend: str = ""  # 'triton', 'flashinfer', 'native' or 'torch'
    weights: str = ""  # what they are where not of `dtype`: 'int4', 'gptq 4-bit', 'gguf Q4_K and Q6_K'
    kv_dtype: str = ""  # of the KV cache where not of `dtype`: 'int8', 'fp8'
    num_state_slots: int = 0  # for recurrent states; 0: the model has none
    weight_file: str = ""  # the GGUF file that was loaded, or the first of several; its others are in `model`

    @property
    def formats(self) -> str:
        """For a person: 'float32', or 'bfloat16, int4 weights'."""
        return f"{self.dtype}, {self.weights} weights" if self.weights else self.dtype


class RosterEntry(msgspec.Struct, array_like=True, frozen=True):
    """One engine of a group. `socket` is the name of its clients' socket in the daemon's run directory."""

    index: Annotated[int, Meta(ge=0)]  # it keeps it, also when it is restarted; nobody else gets it
    socket: Annotated[str, Meta(max_length=MAX_SOCKET_NAME_LENGTH)]
    is_draining: bool = False  # nothing new is to go there, and what runs is to be moved
    is_away: bool = False  # it starts, or is restarted


class EngineRoster(msgspec.Struct, array_like=True, frozen=True):
    """The engines of a group, in the order of their numbers.

    A supervisor tells its cores, on the link that it has to each; a core takes it from nobody else, and tells
    its clients: in Welcome, and whenever it changes. An engine that is not in it any more is gone for good.
    A client hears it from each engine, some late: what is not newer than what it knows is of the past.
    """

    engines: Annotated[list[RosterEntry], Meta(max_length=MAX_ROSTER_ENTRIES)]
    version: int = 0  # grows with every change


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The engine is ready for this client.

    After a second one it adds every unfinished request again, with the tokens it has (`output_token_ids`):
    the engine, restarted (another epoch) or not, has none of them.
    """

    protocol_version: int
    epoch: str
    facts: EngineFacts
    number: int = 0
    engine_index: int = 0  # which one of the roster it is
    roster: EngineRoster | None = None  # None: there is no other engine
    has_worker: bool = True  # as WorkerStatus


class WorkerStatus(msgspec.Struct, array_like=True, frozen=True):
    """The engine has lost its worker and starts another, which takes seconds; or that one is there.

    Requests may wait for it, or go on at another engine.
    """

    has_worker: bool


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """The engine will not serve this connection: version mismatch, failed start, shutting down."""

    reason: Reason
    kind: Annotated[str, Meta(max_length=64)] = "EngineStartError"  # the class that fits in the frontend
    number: int | None = None  # of the Hello that it answers; None: of the last one, whichever that is


class StartupProgress(msgspec.Struct, array_like=True, frozen=True):
    """A start-up phase has begun, or the roster has changed. The rest is as in Welcome."""

    phase: Annotated[str, Meta(max_length=256)]
    engine_index: int = 0
    roster: EngineRoster | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One sequence to generate, or with pooling_params one to compute and answer with what is pooled of it.
    n > 1 has become n of these in the frontend.

    Answered by outputs of which exactly one, the last, has a finish_reason; by ERROR if it can never run.
    """

    request_id: RequestId  # unique over all clients: the frontend adds a random part
    prompt_token_ids: PackedTokenIds
    # seed is set, logprobs are numbers; without its lists (`token_lists.drop_packed`)
    sampling_params: SamplingParams
    arrival_time: float  # seconds since the epoch, for fcfs and metrics
    eos_token_ids: Annotated[list[int], Meta(max_length=MAX_EOS_TOKEN_IDS)] = []  # []: they end nothing
    output_token_ids: PackedTokenIds = b""  # a resumed request: what it has already generated
    options: RequestOptions = NO_OPTIONS
    token_lists: TokenLists = TokenLists()
    is_resumed: bool = False  # sent before: an engine may have taken it on, so it is never OVERLOADED
    num_attempts: Annotated[int, Meta(ge=0)] = 0  # engines lost with it in a row, without a token in between
    grammar: Grammar = ""  # that its output follows, as llguidance reads it; empty: none
    extra_args: ExtraArgs = ""  # SamplingParams.extra_args as JSON, for logits processors; empty: none
    purpose: Purpose = ""  # what people see it counted as, where the engine itself cannot tell
    pooling_params: PoolingParams | None = None  # nothing is generated; sampling_params are read by nobody
    type_start: Annotated[int, Meta(ge=0)] | None = None  # tokens from here on are of type 1; None: none are
    # Since it was added, where it is added again: counts in place of an arrival_time that is not finite.
    age_s: Annotated[float, Meta(ge=0.0, le=MAX_TIMEOUT_S)] = 0.0
    num_sequences: Annotated[int, Meta(ge=0, le=MAX_N)] = (
        1  # of the request whose first this is; 0: a further one
    )
    is_continued: bool = False  # others go on from its tokens: its last block, too, can be found afterwards


class EngineCoreRequests(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Several requests in one frame. Each is taken on or refused, and answered, on its own."""

    requests: Annotated[list[EngineCoreRequest], Meta(max_length=MAX_REQUESTS_PER_FRAME)]


class AbortRequests(msgspec.Struct, array_like=True, frozen=True):
    """Each live one ends with ABORT; ids and names that are unknown or finished are ignored.

    `request_ids` are the sender's own. `names` are of any client's requests, of `tenant` if it is given;
    the id of a request is a name of it.
    """

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_IDS_PER_ABORT)]
    names: Annotated[list[RequestName], Meta(max_length=MAX_IDS_PER_ABORT)] = []
    tenant: Tenant = ""


def make_aborts(request_ids: Sequence[str]) -> list[AbortRequests]:
    """The messages that end any number of requests."""
    starts = range(0, len(request_ids), MAX_IDS_PER_ABORT)
    return [AbortRequests(list(request_ids[start : start + MAX_IDS_PER_ABORT])) for start in starts]


class FrontendCounts(msgspec.Struct, array_like=True, frozen=True):
    """What a frontend has counted since it last said so; the engine adds up what all of them say.

    num_tool_parse_errors: calls of tools in outputs that could not be read. num_reasoning_tokens: those of
    outputs that were thoughts.
    """

    num_tool_parse_errors: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    num_reasoning_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """Call `method`; the answer carries the same call_id."""

    call_id: int
    method: UtilityMethod


class UtilityResult(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a UtilityCall: an error text, or what was asked for, or neither."""

    call_id: int
    error: Reason | None = None
    stats: SchedulerStats | None = None
    snapshot: EngineSnapshot | None = None
    metrics: EngineMetrics | None = None
    digest: EngineDigest | None = None
    trace: StepTrace | None = None
    history: EngineHistory | None = None


class Goodbye(msgspec.Struct, array_like=True, frozen=True):
    """This client leaves; its requests are aborted without an answer.

    Also the answer to Refusal and EngineDead, whose sender waits a moment for it. The client that owns a
    private engine ends it by closing the lifeline pipe, not by a message.
    """


class LogprobsBlock(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Logprobs of `num_positions` consecutive tokens, `width` entries each, as raw arrays.

    Entry 0 of a position is the token itself, the rest are the most likely ones in falling order.
    token_ids: int32 [num_positions, width]. logprobs: float32 [num_positions, width].
    ranks: int32 [num_positions], the token's own rank in the vocabulary, from 1.
    """

    num_positions: int
    width: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


def drop_positions(block: LogprobsBlock, count: int) -> LogprobsBlock:
    """The block without its first `count` positions; itself if count is not positive."""
    if count <= 0:
        return block
    count = min(count, block.num_positions)
    entry_size_bytes = 4 * block.width  # int32 and float32 alike
    return LogprobsBlock(
        block.num_positions - count,
        block.width,
        block.token_ids[count * entry_size_bytes :],
        block.logprobs[count * entry_size_bytes :],
        block.ranks[count * 4 :],
    )


class RequestTimes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Sent with a request's last output; times in seconds of the core's wall clock."""

    queued: float
    scheduled: float
    first_token: float
    last_token: float
    num_preemptions: int


class EngineCoreOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """New tokens of one request, and its end if finish_reason is set."""

    request_id: str
    start: int  # position of the first token in the output: a frontend merges by it and drops what it has
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id; None for end-of-sequence
    error: str | None = None  # the cause, with finish_reason ERROR
    logprobs: LogprobsBlock | None = None
    prompt_logprobs: LogprobsBlock | None = None  # positions 1..; may come in parts, in order
    num_cached_tokens: int | None = None  # set once, with the first token
    times: RequestTimes | None = None
    error_code: ErrorCode | None = None
    pooled: bytes | None = None  # float32, as RowPooled.data; of token-wise tasks in parts, in order
    pooled_start: int = 0  # at which byte of the whole answer those begin: as `start`, of tokens


class EngineCoreOutputs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one client gets from one or more steps, at most one a step."""

    outputs: list[EngineCoreOutput]
    epoch: str = ""


class EngineDead(msgspec.Struct, array_like=True, frozen=True):
    """The engine ends; nothing can be continued. The reason is the root cause."""

    reason: Reason


class LeaseCheck(msgspec.Struct, array_like=True, frozen=True):
    """To every client when some connection has ended: that it can be sent says that its receiver is there.

    A client's lease is its connection, and ZeroMQ heartbeats (`sockets.py`) end that of a peer which is dead
    or stopped. Requests of a client that is gone are dropped.
    """


class ProtocolNotice(msgspec.Struct, array_like=True, frozen=True):
    """A frame of yours did not decode or was out of place.

    request_id: of the request in one that did not decode, as far as it can be told.
    """

    reason: Reason
    request_id: RequestId | None = None


# The first byte of a message -> its type; from 0x11 on they are the engine's
# (EngineRoster also goes from a supervisor to its engine).
MESSAGE_TYPES: dict[bytes, type[msgspec.Struct]] = {
    b"\x01": Hello,
    b"\x02": EngineCoreRequest,
    b"\x03": AbortRequests,
    b"\x04": UtilityCall,
    b"\x05": Goodbye,
    b"\x06": FrontendCounts,
    b"\x07": EngineCoreRequests,
    b"\x11": Welcome,
    b"\x12": Refusal,
    b"\x13": StartupProgress,
    b"\x14": EngineCoreOutputs,
    b"\x15": UtilityResult,
    b"\x16": EngineDead,
    b"\x17": ProtocolNotice,
    b"\x18": LeaseCheck,
    b"\x19": EngineRoster,
    b"\x1a": WorkerStatus,
}
