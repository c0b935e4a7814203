"""RequestLedger: a client's unfinished requests with the tokens it has received: the truth about them.

An engine that was restarted, or that has dropped this client, is brought up to date from it: every request
is added again with its tokens and goes on at the next position. Knows no socket and no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from .messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    drop_positions,
    make_aborts,
)

_LEAST_TIMEOUT_S = 1e-3  # what is left of a time-out that passed while there was no engine


class _Entry(msgspec.Struct):
    request: EngineCoreRequest
    added_at: float
    is_sent: bool  # to an engine, through this or an earlier connection
    output: array[int]
    is_aborted: bool = False
    num_attempts: int = 0  # engines that were lost with it in a row, without a token in between
    num_output_at_loss: int = -1
    num_prompt_logprobs: int = 0  # positions that were delivered
    num_repeated: int = 0  # positions among them that the engine has said again since it was resumed
    pooled_bytes: int = 0  # of vectors that were delivered

    def note_loss(self) -> None:
        """The engine that it was sent to is lost."""
        got_further = len(self.output) > self.num_output_at_loss
        self.num_attempts = 1 if got_further else self.num_attempts + 1
        self.num_output_at_loss = len(self.output)


class RequestLedger:
    """Unfinished requests by id. A call costs in proportion to what it is given, `resume` to what is here."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: EngineCoreRequest, now: float, is_sent: bool = True) -> None:
        """Enter a request that the engine gets now (`is_sent`), or will get when there is one again."""
        output = array("i", request.output_token_ids)
        self._entries[request.request_id] = _Entry(request, now, is_sent, output)

    def remove(self, request_id: str) -> None:
        """Forget a request that could not be handed over."""
        self._entries.pop(request_id, None)

    def fail(self, request_id: str, reason: str) -> list[EngineCoreOutput]:
        """The end, with an error, of a request that is here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return []
        end = FinishReason.ERROR
        return [EngineCoreOutput(request_id, len(entry.output), [], finish_reason=end, error=reason)]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Note that these are to end; an engine that is resumed meanwhile is told so again."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None:
                entry.is_aborted = True

    def take(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Enter what the engine sent and return what is to be delivered of it.

        Outputs of requests that are not here are dropped. Tokens that were delivered before stay in: whoever
        reads merges by position; vectors do not. What comes after a gap is dropped: the connection has ended
        in between and nobody has noticed yet; `resume` will make up for it.
        """
        kept: list[EngineCoreOutput] = []
        for output in outputs:
            entry = self._entries.get(output.request_id)
            if entry is None:
                continue
            num_known = len(entry.output) - output.start
            if num_known < 0 or output.pooled_start > entry.pooled_bytes:
                continue
            entry.output.extend(output.new_token_ids[num_known:])
            if output.prompt_logprobs is not None:
                output = _drop_repeated(entry, output)
            if output.pooled is not None:
                output = _drop_repeated_vectors(entry, output.pooled, output)
            if output.finish_reason is not None:
                del self._entries[output.request_id]
            kept.append(output)
        return kept

    def resume(self, now: float, is_other_engine: bool = False) -> list[EngineCoreRequest | AbortRequests]:
        """What an engine that knows none of these requests must be sent, in order of their arrival.

        `is_other_engine`: it is in the place of one that was lost, perhaps through one of them.
        """
        aborted = [request_id for request_id, entry in self._entries.items() if entry.is_aborted]
        messages: list[EngineCoreRequest | AbortRequests] = []
        for entry in self._entries.values():
            entry.num_repeated = 0
            if is_other_engine and entry.is_sent:
                entry.note_loss()
            messages.append(_resumed(entry, now))
            entry.is_sent = True
        return messages + make_aborts(aborted)


def _resumed(entry: _Entry, now: float) -> EngineCoreRequest:
    request = entry.request
    timeout_s = request.timeout_s
    if timeout_s is not None:
        timeout_s = max(_LEAST_TIMEOUT_S, timeout_s - (now - entry.added_at))
    return msgspec.structs.replace(
        request,
        output_token_ids=entry.output.tobytes(),
        timeout_s=timeout_s,
        is_resumed=entry.is_sent,
        num_attempts=entry.num_attempts,
    )


def _drop_repeated(entry: _Entry, output: EngineCoreOutput) -> EngineCoreOutput:
    """The output without prompt positions that were delivered before the engine was resumed."""
    block = output.prompt_logprobs
    assert block is not None
    num_known = entry.num_prompt_logprobs - entry.num_repeated
    entry.num_repeated += block.num_positions
    entry.num_prompt_logprobs = max(entry.num_prompt_logprobs, entry.num_repeated)
    block = drop_positions(block, num_known)
    return msgspec.structs.replace(output, prompt_logprobs=block if block.num_positions else None)


def _drop_repeated_vectors(entry: _Entry, pooled: bytes, output: EngineCoreOutput) -> EngineCoreOutput:
    """The output without vectors that were delivered before."""
    num_known = entry.pooled_bytes - output.pooled_start
    entry.pooled_bytes = max(entry.pooled_bytes, output.pooled_start + len(pooled))
    if not num_known:
        return output
    return msgspec.structs.replace(
        output, pooled=pooled[num_known:], pooled_start=output.pooled_start + num_known
    )
