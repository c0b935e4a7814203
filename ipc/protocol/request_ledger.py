"""RequestLedger: a client's unfinished requests with the tokens it has received: the truth about them.

An engine that was restarted, or that has dropped this client, is brought up to date from it: every request
is added again with its tokens and goes on at the next position. Knows no socket and no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import msgspec

from .messages import (
    MAX_TIMEOUT_S,
    SUSPECT_ATTEMPTS,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineCoreRequests,
    ErrorCode,
    FinishReason,
    drop_positions,
    make_aborts,
)
from .request_price import frame_requests

Resumed = EngineCoreRequest | EngineCoreRequests | AbortRequests

_LEAST_TIMEOUT_S = 1e-3  # what is left of a time-out that passed while there was no engine


class LedgerEntry(msgspec.Struct):
    """An unfinished request and what has been received of it."""

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
    refused_by: tuple[int, ...] = ()  # engines that had no room for it
    is_here: bool = False  # sent to the engine of the ledger that it is in, which may be lost by now

    def note_loss(self) -> None:
        """The engine of its ledger is lost, perhaps with it."""
        if self.is_here:
            self.num_attempts = self.num_attempts_after_loss
            self.num_output_at_loss = len(self.output)

    @property
    def num_attempts_after_loss(self) -> int:
        """What `num_attempts` becomes with the loss of its ledger's engine."""
        if not self.is_here:
            return self.num_attempts
        got_further = len(self.output) > self.num_output_at_loss
        return 1 if got_further else self.num_attempts + 1


class RequestLedger:
    """Unfinished requests by id. A call costs in proportion to what it is given, `resume` to what is here."""

    def __init__(self) -> None:
        self._entries: dict[str, LedgerEntry] = {}
        self.refused: dict[str, LedgerEntry] = {}  # for want of room, by the outputs of the last `take`

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ids(self) -> list[str]:
        """Of all that are here."""
        return list(self._entries)

    def add(self, request: EngineCoreRequest, now: float, is_sent: bool = True) -> None:
        """Enter a request that the engine gets now (`is_sent`), or will get when there is one again."""
        output = array("i", request.output_token_ids)
        self._entries[request.request_id] = LedgerEntry(request, now, is_sent, output, is_here=is_sent)

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
        if self.refused:
            self.refused = {}
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
                if output.error_code is ErrorCode.OVERLOADED:
                    self.refused[output.request_id] = entry
            kept.append(output)
        return kept

    def resume(self, now: float, is_other_engine: bool = False) -> list[Resumed]:
        """What an engine that knows none of these requests must be sent, in order of their arrival.

        `is_other_engine`: it is in the place of one that was lost, perhaps through one of them.
        """
        if is_other_engine:
            _note_losses(self._entries.values())
        return _resume(self._entries.values(), now)

    def release(self, *, is_lost: bool, with_suspects: bool = True) -> list[LedgerEntry]:
        """Give up requests that another engine's ledger is to `adopt`, in order of their arrival.

        is_lost: the engine that has them is, perhaps through one of them. Without `with_suspects` those stay
        that are to run alone after this loss: where the first of them brought down one engine, they shall
        not bring down each of the others.
        """
        entries = list(self._entries.values())
        if not with_suspects:
            entries = [entry for entry in entries if not _is_suspect_after_loss(entry)]
        for entry in entries:
            del self._entries[entry.request.request_id]
        if is_lost:
            _note_losses(entries)
        return entries

    @property
    def has_suspects(self) -> bool:
        """Whether the engine runs one of these alone: two were lost with it, and it got no further since."""
        entries = self._entries.values()
        return any(entry.is_sent and entry.num_attempts_after_loss > SUSPECT_ATTEMPTS for entry in entries)

    def note_loss(self) -> None:
        """The engine has lost its worker, perhaps through one of these."""
        _note_losses(self._entries.values())

    def adopt(self, entries: list[LedgerEntry], now: float, is_open: bool) -> list[Resumed]:
        """Enter what another ledger has given up; what the engine must be sent if it `is_open`."""
        for entry in entries:
            entry.is_here = False
            self._entries[entry.request.request_id] = entry
        return _resume(entries, now) if is_open else []


def _is_suspect_after_loss(entry: LedgerEntry) -> bool:
    return entry.is_sent and entry.num_attempts_after_loss >= SUSPECT_ATTEMPTS


def _note_losses(entries: Iterable[LedgerEntry]) -> None:
    for entry in entries:
        entry.note_loss()


def _resume(entries: Collection[LedgerEntry], now: float) -> list[Resumed]:
    """The messages that add these, and end those among them that are to end."""
    requests: list[EngineCoreRequest] = []
    for entry in entries:
        entry.num_repeated = 0
        requests.append(_resumed(entry, now))
        entry.is_sent = entry.is_here = True
    aborted = [entry.request.request_id for entry in entries if entry.is_aborted]
    return [*frame_requests(requests), *make_aborts(aborted)]


def _resumed(entry: LedgerEntry, now: float) -> EngineCoreRequest:
    request, options = entry.request, entry.request.options
    age_s = min(max(0.0, now - entry.added_at), MAX_TIMEOUT_S)
    if options.timeout_s is not None:
        timeout_s = max(_LEAST_TIMEOUT_S, options.timeout_s - age_s)
        options = msgspec.structs.replace(options, timeout_s=timeout_s)
    return msgspec.structs.replace(
        request,
        output_token_ids=entry.output.tobytes(),
        options=options,
        is_resumed=entry.is_sent,
        num_attempts=entry.num_attempts,
        age_s=age_s,
    )


def _drop_repeated(entry: LedgerEntry, output: EngineCoreOutput) -> EngineCoreOutput:
    """The output without prompt positions that were delivered before the engine was resumed."""
    block = output.prompt_logprobs
    assert block is not None
    num_known = entry.num_prompt_logprobs - entry.num_repeated
    entry.num_repeated += block.num_positions
    entry.num_prompt_logprobs = max(entry.num_prompt_logprobs, entry.num_repeated)
    block = drop_positions(block, num_known)
    return msgspec.structs.replace(output, prompt_logprobs=block if block.num_positions else None)


def _drop_repeated_vectors(entry: LedgerEntry, pooled: bytes, output: EngineCoreOutput) -> EngineCoreOutput:
    """The output without vectors that were delivered before."""
    num_known = entry.pooled_bytes - output.pooled_start
    entry.pooled_bytes = max(entry.pooled_bytes, output.pooled_start + len(pooled))
    if not num_known:
        return output
    return msgspec.structs.replace(
        output, pooled=pooled[num_known:], pooled_start=output.pooled_start + num_known
    )
