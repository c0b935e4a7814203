"""The protocol between frontends and the engine core (version 3).

A message is one ZeroMQ frame: a byte that names its type (`MessageType`), then a msgpack body.
The engine binds one ROUTER; every frontend is a DEALER with a random identity. Each field has a cap; a
frame that does not decode costs its sender a ProtocolNotice and nobody else anything. A field that is added
at the end of a message, with a default, is left out by a side that does not know it.

Hello: frontend, first thing after connecting, and again after every reconnection. Answered by Welcome when
  the engine is ready, or by Refusal. While the engine starts, StartupProgress comes in between. The
  client begins anew: what the engine still held for it is dropped without an answer.
Welcome: the engine's epoch and facts. After a second Welcome the frontend re-adds every unfinished request
  with the tokens it has (`EngineCoreRequest.output_token_ids`): the engine, restarted (another epoch) or
  not, has none of them.
Refusal: version mismatch, failed start, shutting down; the reason is final for this connection.
EngineCoreRequest: frontend, adds a request. Answered by outputs until one has a finish_reason; exactly one
  has. A request that can never run is answered at once with finish_reason ERROR and the cause.
AbortRequests: frontend; ids that are unknown or finished are ignored. Each live one ends with ABORT.
UtilityCall: frontend, one of a closed enumeration; answered by UtilityResult with the same call_id.
Goodbye: frontend, before it leaves; its requests are aborted without an answer. Also the answer to Refusal
  and EngineDead, whose sender waits a moment for it. The client that owns a private engine ends it by
  closing the lifeline pipe, not by a message.
EngineCoreOutputs: core, at most one a step and client. `EngineCoreOutput.start` is the position of its first
  token among the request's output tokens, so a frontend merges by position and drops what it has.
EngineDead: core, last message before it exits because it cannot go on; the reason is the root cause.
ProtocolNotice: core, about a frame that did not decode or is out of place.

LeaseCheck: core, to every client when some connection has ended, to learn whose: a client's lease is its
  connection, and ZeroMQ heartbeats (`sockets.py`) end that of a peer which is dead or stopped. Requests of a
  client that is gone are dropped. Not answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from .config import RecoveryConfig
from .sampling_params import SamplingParams
from .token_lists import TokenLists

PROTOCOL_VERSION = 3

MAX_REQUEST_ID_LENGTH = 256
MAX_CACHE_SALT_LENGTH = 128
MAX_PROMPT_BYTES = 64 * 1024 * 1024  # 16 M token ids
MAX_IDS_PER_ABORT = 2048  # more are several messages
MAX_EOS_TOKEN_IDS = 1024
MAX_REASON_LENGTH = 65536
MAX_TENANT_LENGTH = 128
MAX_CLIENT_WEIGHT = 1000.0
MAX_TIMEOUT_S = 86400.0 * 7

# Kinds of clients that only look; they are not counted as clients where people read it.
OBSERVER_KINDS = frozenset({"supervisor", "ps", "top", "serve"})

RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_LENGTH)]
PackedTokenIds = Annotated[bytes, Meta(max_length=MAX_PROMPT_BYTES)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
Tenant = Annotated[str, Meta(max_length=MAX_TENANT_LENGTH)]
Weight = Annotated[float, Meta(gt=0.0, le=MAX_CLIENT_WEIGHT)]
Timeout = Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)]


class MessageType(bytes, Enum):
    """First byte of every message."""

    HELLO = b"\x01"
    ADD = b"\x02"
    ABORT = b"\x03"
    UTILITY = b"\x04"
    GOODBYE = b"\x05"
    WELCOME = b"\x11"
    REFUSAL = b"\x12"
    PROGRESS = b"\x13"
    OUTPUTS = b"\x14"
    UTILITY_RESULT = b"\x15"
    ENGINE_DEAD = b"\x16"
    NOTICE = b"\x17"
    LEASE_CHECK = b"\x18"


class FinishReason(IntEnum):
    """Why a request ended; the texts are OpenAI's and vLLM's."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

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


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The first message on a connection. `client_kind` and `pid` are for people who look at the engine."""

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


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """The engine is ready for this client."""

    protocol_version: int
    epoch: str
    facts: EngineFacts
    number: int = 0


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """The engine will not serve this client. `kind` names the error class that fits in the frontend."""

    reason: Reason
    kind: Annotated[str, Meta(max_length=64)] = "EngineStartError"


class StartupProgress(msgspec.Struct, array_like=True, frozen=True):
    """A start-up phase has begun."""

    phase: Annotated[str, Meta(max_length=256)]


class EngineCoreRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One sequence to generate. n > 1 has become n of these in the frontend."""

    request_id: RequestId  # unique over all clients: the frontend adds a random part
    prompt_token_ids: PackedTokenIds
    sampling_params: SamplingParams  # seed is set; without its lists (`token_lists.drop_packed`)
    arrival_time: float  # seconds since the epoch, for fcfs and metrics
    eos_token_ids: Annotated[list[int], Meta(max_length=MAX_EOS_TOKEN_IDS)] = []  # empty with ignore_eos
    output_token_ids: PackedTokenIds = b""  # a resumed request: what it has already generated
    priority: int = 0  # lower runs first
    cache_salt: Annotated[str, Meta(max_length=MAX_CACHE_SALT_LENGTH)] = ""
    token_lists: TokenLists = TokenLists()
    tenant: Tenant = ""  # whose it is under the fair policy; empty: the client's own
    timeout_s: Timeout | None = None  # after its arrival it ends with ABORT and what it has
    queue_timeout_s: Timeout | None = None  # if it has not begun by then it ends with QUEUE_TIMEOUT
    is_resumed: bool = False  # sent before: an engine may have taken it on, so it is never OVERLOADED
    num_attempts: Annotated[int, Meta(ge=0)] = 0  # engines lost with it in a row, without a token in between


class AbortRequests(msgspec.Struct, array_like=True, frozen=True):
    """End these requests now."""

    request_ids: Annotated[list[RequestId], Meta(max_length=MAX_IDS_PER_ABORT)]


def make_aborts(request_ids: Sequence[str]) -> list[AbortRequests]:
    """The messages that end any number of requests."""
    starts = range(0, len(request_ids), MAX_IDS_PER_ABORT)
    return [AbortRequests(list(request_ids[start : start + MAX_IDS_PER_ABORT])) for start in starts]


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """Call `method`; the answer carries the same call_id."""

    call_id: int
    method: UtilityMethod


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A look at the engine at one moment. Counters (`_total`) only grow within an epoch."""

    num_running: int
    num_waiting: int
    num_clients: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_cache_queries_total: int  # tokens looked up
    prefix_cache_hits_total: int  # tokens found
    num_preemptions_total: int
    num_steps_total: int
    prompt_tokens_total: int  # computed, without cached ones
    generation_tokens_total: int
    schedule_s_total: float  # time in schedule()
    update_s_total: float  # time in update()
    step_wait_s_total: float  # time blocked on the executor with work in flight
    held_bytes: int = 0  # the price of all live requests


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One live request as a person sees it."""

    request_id: str
    client: str  # ClientView.name
    state: str  # running, waiting or preempted
    waits_for: str  # why it does not run, '' when it runs
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_total_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    held_bytes: int = 0  # its price: what the core holds for it (request_price.py)


class ClientView(msgspec.Struct, frozen=True, kw_only=True):
    """One attached client as a person sees it."""

    name: str
    kind: str
    pid: int
    weight: float
    num_running: int
    num_waiting: int
    tokens_served_total: int
    num_unsent: int  # outputs that wait for it to read
    connected_s: float


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the live views show: the engine at one moment, rates over the last seconds."""

    at: float  # wall clock
    epoch: str
    model: str  # as served
    max_num_seqs: int
    uptime_s: float
    stats: SchedulerStats
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    steps_per_s: float
    schedule_ms: float  # a step, mean over the same window; so are the next two
    update_ms: float
    step_wait_ms: float
    requests: list[RequestView]  # the first ones in running, then in waiting order
    num_hidden_requests: int
    # A cell is a run of equally many blocks in the order of their ids; the last may be shorter. It has two
    # bytes: the share of its blocks in use, and the share with contents to be found again, 0 to 255 each.
    block_map: bytes
    blocks_per_cell: int
    clients: list[ClientView]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """`counts[i]` observations were at most `bounds[i]` and above the bound before; the last has no bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is counted since the core started, over all clients; names without the prefix."""

    stats: SchedulerStats
    histograms: dict[str, Histogram]
    finished_total: dict[str, int]  # finish reason -> requests


class UtilityResult(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a UtilityCall: an error text, or what was asked for, or neither."""

    call_id: int
    error: Reason | None = None
    stats: SchedulerStats | None = None
    snapshot: EngineSnapshot | None = None
    metrics: EngineMetrics | None = None


class Goodbye(msgspec.Struct, array_like=True, frozen=True):
    """This client leaves."""


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
    start: int
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id; None for end-of-sequence
    error: str | None = None  # the cause, with finish_reason ERROR
    logprobs: LogprobsBlock | None = None
    prompt_logprobs: LogprobsBlock | None = None  # positions 1..; may come in parts, in order
    num_cached_tokens: int | None = None  # set once, with the first token
    times: RequestTimes | None = None
    error_code: ErrorCode | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one client gets from one or more steps."""

    outputs: list[EngineCoreOutput]
    epoch: str = ""


class EngineDead(msgspec.Struct, array_like=True, frozen=True):
    """The engine ends; nothing can be continued."""

    reason: Reason


class LeaseCheck(msgspec.Struct, array_like=True, frozen=True):
    """Nothing: that it can be sent says that its receiver is there."""


class ProtocolNotice(msgspec.Struct, array_like=True, frozen=True):
    """A frame of yours was dropped."""

    reason: Reason
