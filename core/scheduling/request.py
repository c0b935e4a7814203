"""Request: the life of one sequence inside the core, as plain state with the few rules that are its own.

Token counts follow one identity: known + placeholders - computed = tokens that the next step can be given.
known: prompt and output tokens whose values are here. placeholders: tokens that steps in flight sample.
computed: tokens whose K and V are in the cache, or will be when the steps in flight have run.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Literal

from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.request_options import RequestOptions
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineCoreRequest, FinishReason, Purpose, RequestTimes
from ...ipc.protocol.request_price import find_held_bytes
from ...ipc.protocol.step import GroupBlocks, NewRequestData
from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES, count_token_ids, decode_token_ids
from ...ipc.protocol.token_lists import NO_LISTS, TokenLists
from ..kv.state_slots import Snapshot
from .repetition import RepetitionDetector
from .tenant import Tenant

# (rank, arrival time, number of arrival): what runs first, and in reverse what is preempted first.
QueueOrder = tuple[int, float, int]

RequestKind = Literal["plain", "grammar", "beam_search", "tools", "thinking", "pooling"]
NEVER = sys.maxsize
_LONG_PROMPT_BYTES = 4096  # of a prompt that sequences share


class RequestStatus(Enum):
    """Where a request is. Why a finished one ended is its `finish_reason`."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # waiting again; it will be computed again from prompt + output
    FINISHED = auto()


@dataclass(slots=True)
class HeldBlocks:
    """A request's blocks of one KV group: `ids[i]` is the block `first + i` of its sequence."""

    ids: list[int] = field(default_factory=list[int])
    first: int = 0

    @property
    def end(self) -> int:
        """The block of the sequence after the last."""
        return self.first + len(self.ids)


@dataclass(slots=True, eq=False)
class Request:
    """One live request. Fields in the second half change as it runs."""

    request_id: str
    client: bytes
    tenant: Tenant  # whose account it is on; who may see it is options.tenant
    sampling_params: SamplingParams
    prompt_token_ids: bytes
    num_prompt_tokens: int
    # Prompt + output at the longest; with `pooling_params` the prompt: the scheduler then never takes its
    # last token for one that is decoded.
    max_total_tokens: int
    eos_token_ids: list[int]
    stop_token_ids: frozenset[int]  # end-of-sequence tokens included
    token_lists: TokenLists
    grammar: str
    extra_args: str
    options: RequestOptions
    order: QueueOrder
    queued_time: float
    timeout_at: float | None  # monotonic clock; so is the next
    queue_timeout_at: float | None
    num_attempts: int  # as in the message
    held_bytes: int  # its price; its tenant's account has it

    output_token_ids: array[int]
    num_tokens: int  # known
    repetition: RepetitionDetector | None = None  # of requests with repetition_detection
    num_placeholders: int = 0
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    row: int | None = None
    blocks: list[HeldBlocks] = field(default_factory=list[HeldBlocks])  # by KV group; [] if it holds none
    num_slots: int = 0  # tokens that those have room for in every group, from the sequence's first on
    block_hashes: list[bytes] = field(default_factory=list[bytes])  # of full blocks of known tokens
    # Of a model with recurrent layers (core/kv/state_slots.py):
    state_slot: int | None = None  # that holds its states; None: it does not run
    copied_slot: int | None = None  # whose states it goes on from
    trailing: Snapshot | None = None  # the last one that was saved while it decoded
    # (number of tokens, whether others give way) after which states are to be saved, the first one last
    save_points: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    next_save_at: int = NEVER  # number of computed tokens
    entered_at: int = 0  # admissions up to its own
    has_awaited: bool = False  # a state that another one was about to save
    num_kept_tokens: int = 0  # computed when it was preempted, if they may be found again
    num_indexed_blocks: int = 0  # leading blocks that the prefix index was told of
    next_index_at: int = NEVER  # number of known tokens that completes the next block for the index
    num_cached_tokens: int | None = None  # prefix hit of the first admission
    prefix_miss: str = ""  # why it was no longer, for a person; empty: it was as long as it could be
    num_prompt_logprobs: int = 0  # prompt positions whose logprobs were delivered
    num_preemptions: int = 0
    policy_data: Any = None  # what the scheduling policy notes of it; nobody else's business
    purpose: Purpose = ""  # as in the message
    is_continued: bool = False  # likewise
    pooling_params: PoolingParams | None = None  # likewise: it ends with its prompt
    type_start: int | None = None  # likewise
    num_sequences: int = 1  # likewise
    answer_bytes: int = 0  # part of its price: what is pooled of it
    num_pooled_tokens: int = 0  # of a token-wise task, those whose vectors were delivered
    # Its own work in steps (work_turns.py):
    work_us: int | None = None  # of its next token, as those before say; None: nobody knows
    entry_work_us: int = 0  # of its first token in a row, beside that
    num_measured: int = 0  # tokens since it has its row
    total_work_us: int = 0
    last_turn: int = 0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float = 0.0

    @classmethod
    def from_message(
        cls,
        message: EngineCoreRequest,
        client: bytes,
        tenant: Tenant,
        order: QueueOrder,
        max_model_len: int,
        now: float,
        monotonic_now: float = 0.0,
        answer_bytes: int = 0,
    ) -> Request:
        """A waiting request; tokens that it comes with (`output_token_ids`) count as generated.

        With such tokens it has begun before, so its time in the queue is not bounded. `answer_bytes`: of what
        is pooled of it.
        """
        params = message.sampling_params
        output = array("i", message.output_token_ids)
        num_prompt = count_token_ids(message.prompt_token_ids)
        max_tokens = params.max_tokens
        options = message.options
        timeout_s, queue_timeout_s = options.timeout_s, None if output else options.queue_timeout_s
        max_total = max_model_len if max_tokens is None else min(num_prompt + max_tokens, max_model_len)
        if message.pooling_params is not None:
            max_total = num_prompt
        return cls(
            request_id=message.request_id,
            client=client,
            tenant=tenant,
            sampling_params=params,
            prompt_token_ids=_share_prompt(message.prompt_token_ids),
            num_prompt_tokens=num_prompt,
            max_total_tokens=max_total,
            eos_token_ids=message.eos_token_ids,
            stop_token_ids=_make_stop_set(tuple(message.eos_token_ids), message.token_lists.stop),
            token_lists=_share_lists(message.token_lists) if message.token_lists.size_bytes else NO_LISTS,
            grammar=_share_grammar(message.grammar) if message.grammar else "",
            extra_args=message.extra_args,
            options=options,
            order=order,
            queued_time=now,
            timeout_at=None if timeout_s is None else monotonic_now + timeout_s,
            queue_timeout_at=None if queue_timeout_s is None else monotonic_now + queue_timeout_s,
            num_attempts=message.num_attempts,
            held_bytes=find_held_bytes(message) + answer_bytes,
            output_token_ids=output,
            num_tokens=num_prompt + len(output),
            repetition=_make_detector(params, output),
            purpose=message.purpose,
            is_continued=message.is_continued,
            pooling_params=message.pooling_params,
            num_sequences=message.num_sequences,
            type_start=message.type_start,
            answer_bytes=answer_bytes,
        )

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens whose values are known."""
        return len(self.output_token_ids)

    @property
    def kind(self) -> RequestKind:
        """What it is counted as."""
        if self.pooling_params is not None:
            return "pooling"
        return self.purpose or ("grammar" if self.grammar else "plain")

    @property
    def is_token_wise(self) -> bool:
        """Whether each token of its prompt is answered with a vector."""
        return self.pooling_params is not None and self.pooling_params.is_token_wise

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, those included that others hold as well."""
        return sum([len(held.ids) for held in self.blocks])

    @property
    def arrival_time(self) -> float:
        """When its frontend took it on, or when it came here if that frontend's clock is ahead."""
        return self.order[1]

    @property
    def has_begun(self) -> bool:
        """True once it was part of a step, also if it waits again."""
        return self.scheduled_time is not None

    @property
    def rank(self) -> int:
        """As `Policy.rank` said; lower runs first."""
        return self.order[0]

    def packed_tokens(self, start: int, end: int) -> bytes:
        """The known tokens [start, end) of prompt + output, packed as on the wire."""
        num_prompt = self.num_prompt_tokens
        packed = self.prompt_token_ids[start * TOKEN_SIZE_BYTES : end * TOKEN_SIZE_BYTES]
        if end > num_prompt:
            packed += self.output_token_ids[max(start - num_prompt, 0) : end - num_prompt].tobytes()
        return packed

    def find_finish(self) -> FinishReason | None:
        """Why the request ends with the output it has, None if it goes on.

        Stop tokens and repetition count only from min_tokens on. The length limits hold in any case, and so
        does the end of sequence under a grammar: before min_tokens it comes where nothing else may.
        """
        if self.pooling_params is not None:
            return None
        output = self.output_token_ids
        has_minimum = len(output) >= self.sampling_params.min_tokens
        if output and output[-1] in self.stop_token_ids:
            is_forced = bool(self.grammar) and output[-1] in self.eos_token_ids
            if has_minimum or is_forced:
                return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        if has_minimum and self.repetition is not None and self.repetition.is_repeating:
            return FinishReason.REPETITION
        return None

    @property
    def stop_reason(self) -> int | None:
        """The stop token that ended the request; None for end-of-sequence and for every other end."""
        output = self.output_token_ids
        if self.finish_reason is not FinishReason.STOP or not output or output[-1] in self.eos_token_ids:
            return None
        return output[-1]

    def to_new_request_data(self) -> NewRequestData:
        """What the worker needs to enter this request into its row, made before its first step is counted."""
        assert self.row is not None
        return NewRequestData(
            row=self.row,
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids.tobytes(),
            sampling_params=self.sampling_params,
            eos_token_ids=self.eos_token_ids,
            token_lists=self.token_lists,
            blocks=[GroupBlocks(held.ids.copy(), held.first) for held in self.blocks],
            num_computed_tokens=self.num_computed_tokens,
            grammar=self.grammar,
            extra_args=self.extra_args,
            pooling_params=self.pooling_params,
            type_start=self.type_start,
            state_slot=self.state_slot,
        )

    def to_times(self) -> RequestTimes | None:
        """Its times, None if it ended before it produced a token here."""
        if self.scheduled_time is None or self.first_token_time is None:
            return None
        return RequestTimes(
            self.queued_time,
            self.scheduled_time,
            self.first_token_time,
            self.last_token_time,
            self.num_preemptions,
        )


def _make_detector(params: SamplingParams, output: array[int]) -> RepetitionDetector | None:
    detection = params.repetition_detection
    return None if detection is None else RepetitionDetector(detection, output)


# The sequences of a request come one after the other and say the same: they share what is large of it.


@lru_cache(maxsize=16)
def _share_lists(lists: TokenLists) -> TokenLists:
    """The first of equal ones."""
    return lists


def _share_prompt(packed: bytes) -> bytes:
    return _share_long_prompt(packed) if len(packed) >= _LONG_PROMPT_BYTES else packed


@lru_cache(maxsize=4)
def _share_long_prompt(packed: bytes) -> bytes:
    return packed


@lru_cache(maxsize=16)
def _share_grammar(grammar: str) -> str:
    return grammar


@lru_cache(maxsize=16)
def _make_stop_set(eos_token_ids: tuple[int, ...], stop_token_ids: bytes) -> frozenset[int]:
    return frozenset(eos_token_ids).union(decode_token_ids(stop_token_ids))


def drop_finished(requests: Iterable[Request]) -> list[Request]:
    """Those that have not ended, each once."""
    return [request for request in dict.fromkeys(requests) if request.finish_reason is None]
