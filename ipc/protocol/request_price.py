"""The price of a request: what it may make a process hold, known before anything is done for it.

Held: what the core holds for a sequence from its arrival to its end (its worker's row holds as much again
while it runs). Result: what a frontend may come to hold until the answer is whole. By their prices requests
that a client hands over together share frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..params.sampling_params import RequestOutputKind, SamplingParams, count_alternatives
from .messages import (
    MAX_GRAMMAR_LENGTH,
    MAX_REQUESTS_PER_FRAME,
    EngineCoreRequest,
    EngineCoreRequests,
)
from .token_ids import TOKEN_SIZE_BYTES
from .token_lists import MAX_LISTS_BYTES

_REQUEST_BYTES = 2048  # of any sequence: its state, its place in queues and in its tenant's ledger
_FRAME_BYTES = 1024 * 1024  # of all that is not token ids: ids, salts, texts of aborts
_TOKEN_BYTES = 64  # of an output token in a frontend: two integers, and its text
_LOGPROB_BYTES = 384  # of an alternative at a position in an answer: numbers, objects, text, JSON (346 found)
_STREAMED_LOGPROB_BYTES = 16


def find_max_frame_bytes(max_model_len: int) -> int:
    """The longest frame that an honest client sends a core whose requests have so many tokens."""
    return max_model_len * TOKEN_SIZE_BYTES + MAX_LISTS_BYTES + 4 * MAX_GRAMMAR_LENGTH + _FRAME_BYTES


def find_held_bytes(request: EngineCoreRequest) -> int:
    """What a core holds for this sequence as it comes; what it generates is bounded by the KV cache."""
    return (
        _REQUEST_BYTES
        + len(request.prompt_token_ids)
        + len(request.output_token_ids)
        + request.token_lists.size_bytes
        + 36 * len(request.eos_token_ids)
        + sum(map(len, request.options.names)) * 4
        + 4 * (len(request.grammar) + len(request.extra_args))  # UTF-8, or as many bytes in memory
    )


class ResultPrice(NamedTuple):
    """Bytes that an answer may come to in a frontend."""

    token_bytes: int
    logprobs_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of tokens and logprobs."""
        return self.token_bytes + self.logprobs_bytes


def find_result_price(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, vocab_size: int
) -> ResultPrice:
    """What the answer to a prompt may come to, over all of its sequences.

    Logprobs are packed until an answer is made of them: a stream does so token by token, all others at once.
    """
    room = max(0, max_model_len - num_prompt_tokens)
    num_tokens = params.num_sequences * (room if params.max_tokens is None else min(params.max_tokens, room))
    is_stream = params.output_kind == RequestOutputKind.DELTA
    entry_bytes = _STREAMED_LOGPROB_BYTES if is_stream else _LOGPROB_BYTES
    num_entries = num_tokens * _count_entries(params.logprobs, vocab_size)
    num_entries += num_tokens * len(params.logprob_token_ids or ())
    num_entries += num_prompt_tokens * _count_entries(params.prompt_logprobs, vocab_size)
    return ResultPrice(num_tokens * _TOKEN_BYTES, num_entries * entry_bytes)


def _count_entries(num_logprobs: int | None, vocab_size: int) -> int:
    num_others = count_alternatives(num_logprobs, vocab_size)
    return 0 if num_others is None else 1 + num_others


# Of the requests in a frame beyond the first, by their price; a core decodes so many bytes in some 1 ms.
MAX_SHARED_BYTES = 512 * 1024


def frame_requests(requests: Iterable[EngineCoreRequest]) -> Iterator[EngineCoreRequest | EngineCoreRequests]:
    """The messages that hand these over, in their order; one alone is a message itself."""
    batch: list[EngineCoreRequest] = []
    size_bytes = 0
    for request in requests:
        price = find_held_bytes(request)
        if batch and (len(batch) == MAX_REQUESTS_PER_FRAME or size_bytes + price > MAX_SHARED_BYTES):
            yield _make_message(batch)
            batch, size_bytes = [], 0
        batch.append(request)
        size_bytes += price
    if batch:
        yield _make_message(batch)


def _make_message(batch: list[EngineCoreRequest]) -> EngineCoreRequest | EngineCoreRequests:
    return batch[0] if len(batch) == 1 else EngineCoreRequests(batch)
