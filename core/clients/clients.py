"""A core's clients: what each is still to be sent, and which of them may be gone.

A ROUTER's monitor says only that some connection has ended. Sending to a peer that is gone fails, so every
client is then sent a LeaseCheck; several times, since the event may overtake the socket's own bookkeeping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from ...ipc.protocol.engine_views import ClientView
from ...ipc.protocol.messages import EngineCoreOutput, EngineCoreOutputs, FrontendCounts, Hello, LogprobsBlock

MAX_REPLIES = 1024  # waiting for one client, beside as many in its socket
MAX_MERGED_BYTES = 16 * 1024 * 1024  # of logprobs and vectors in a message; one step may have more


class Outbox:
    """Messages to one client, in order; the outputs of a request merge while they wait.

    So a slow client costs only the memory of its own tokens, and never blocks the engine or another client.
    """

    def __init__(self) -> None:
        self._replies: deque[msgspec.Struct] = deque()
        self._outputs: dict[str, EngineCoreOutput] = {}
        self._bulk_bytes = 0  # of logprobs and vectors in `_outputs`
        self._full: deque[list[EngineCoreOutput]] = deque()  # earlier outputs, which merge no more

    def __bool__(self) -> bool:
        return bool(self._replies or self._full or self._outputs)

    @property
    def num_unsent(self) -> int:
        """Messages and merged outputs that wait."""
        return len(self._replies) + sum(map(len, self._full)) + len(self._outputs)

    def add_reply(self, message: msgspec.Struct) -> None:
        """Queue a message before waiting outputs; dropped if MAX_REPLIES wait, as the client reads none."""
        if len(self._replies) < MAX_REPLIES:
            self._replies.append(message)

    def add_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Queue outputs, each merged into the one of the same request that still waits."""
        waiting = self._outputs
        for output in outputs:
            if output.pooled is not None:
                self._bulk_bytes += len(output.pooled)
            if output.logprobs is not None or output.prompt_logprobs is not None:
                self._bulk_bytes += _count_bytes(output.logprobs) + _count_bytes(output.prompt_logprobs)
            request_id = output.request_id
            if request_id in waiting:
                output = merge_outputs(waiting[request_id], output)
            waiting[request_id] = output
        if self._bulk_bytes > MAX_MERGED_BYTES:
            self._full.append(list(waiting.values()))
            self._outputs, self._bulk_bytes = {}, 0

    def flush(self, send: Callable[[msgspec.Struct], bool], epoch: str) -> bool:
        """Pass everything to `send` until that returns False (try later). Returns whether nothing is left."""
        while self._replies:
            if not send(self._replies[0]):
                return False
            self._replies.popleft()
        while self._full:
            if not send(EngineCoreOutputs(self._full[0], epoch)):
                return False
            self._full.popleft()
        if self._outputs:
            if not send(EngineCoreOutputs(list(self._outputs.values()), epoch)):
                return False
            self._outputs, self._bulk_bytes = {}, 0
        return True


def merge_outputs(first: EngineCoreOutput, second: EngineCoreOutput) -> EngineCoreOutput:
    """One output in place of two consecutive ones of a request."""
    cached = first.num_cached_tokens if second.num_cached_tokens is None else second.num_cached_tokens
    return msgspec.structs.replace(
        second,
        start=first.start,
        new_token_ids=first.new_token_ids + second.new_token_ids,
        logprobs=_join(first.logprobs, second.logprobs),
        prompt_logprobs=_join(first.prompt_logprobs, second.prompt_logprobs),
        num_cached_tokens=cached,
        pooled=_join_pooled(first.pooled, second.pooled),
        pooled_start=second.pooled_start if first.pooled is None else first.pooled_start,
    )


def _count_bytes(block: LogprobsBlock | None) -> int:
    return 0 if block is None else len(block.token_ids) + len(block.logprobs) + len(block.ranks)


def _join_pooled(first: bytes | None, second: bytes | None) -> bytes | None:
    return first + second if first is not None and second is not None else first or second


def _join(first: LogprobsBlock | None, second: LogprobsBlock | None) -> LogprobsBlock | None:
    if first is None or second is None:
        return first or second
    assert first.width == second.width, "a request asks for one number of logprobs"
    return LogprobsBlock(
        first.num_positions + second.num_positions,
        first.width,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        first.ranks + second.ranks,
    )


_CHECKS_AFTER_S = (0.0, 0.05, 0.5)
_REST = 20  # times the cost of a check until the next: checks take at most 5 % of the core's time


@dataclass(slots=True)
class Client:
    """A frontend that is connected, from its Hello on."""

    hello: Hello
    connected_at: float  # monotonic
    outbox: Outbox = field(default_factory=Outbox)
    counted: FrontendCounts = field(default_factory=FrontendCounts)  # of those that were bounded

    def bound_counts(self, counts: FrontendCounts, most: int) -> FrontendCounts:
        """The part of them that may be true of who was served so many tokens in all."""
        before = msgspec.structs.asdict(self.counted)
        taken = {name: min(getattr(counts, name), most - count) for name, count in before.items()}
        self.counted = FrontendCounts(**{name: before[name] + count for name, count in taken.items()})
        return FrontendCounts(**taken)

    def describe(self, now: float) -> ClientView:
        """Its part of a snapshot, at a monotonic time, without its requests."""
        return ClientView(
            kind=self.hello.client_kind,
            pid=self.hello.pid,
            weight=self.hello.weight,
            num_unsent=self.outbox.num_unsent,
            connected_s=now - self.connected_at,
        )


class LeaseWatch:
    """Knows when clients are to be checked. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: list[float] = []  # sorted
        self._not_before = 0.0

    @property
    def next_check_at(self) -> float | None:
        """When the next check is due, None if none is."""
        return max(self._due[0], self._not_before) if self._due else None

    def note_disconnect(self) -> None:
        """A connection has ended."""
        now = self._clock()
        self._due = [now + after_s for after_s in _CHECKS_AFTER_S]

    def check_if_due(self, check: Callable[[], None]) -> None:
        """Call `check` if it is due. Its cost grows with the clients, so the next one waits for a while."""
        due_at = self.next_check_at
        if due_at is None or due_at > (now := self._clock()):
            return
        self._due = [at for at in self._due if at > now]
        check()
        ended = self._clock()
        self._not_before = ended + _REST * (ended - now)
