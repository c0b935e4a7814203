"""What a user gets back: RequestOutput with one CompletionOutput a sequence. Field names are vLLM's."""

from __future__ import annotations

import msgspec

from ..ipc.protocol.messages import RequestTimes
from .events import AssistantMessage
from .logprobs import LogprobsList

# Timing of one request, as seen by the engine and by this frontend. Plain data; nothing here measures.


class RequestMetrics(msgspec.Struct, kw_only=True, gc=False):
    """Comes with a request's finished output. Times are seconds since the epoch; fields are vLLM's.

    queued_ts, scheduled_ts: the engine's; None when the request ended here (a stop string) before the engine
    had told them. first_token_latency: from arrival to this frontend's sight of the first token, in seconds.
    """

    arrival_time: float
    queued_ts: float | None = None
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    first_token_latency: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    def take_times(self, times: RequestTimes) -> None:
        """Put the engine's times, which are nearer to the truth, in place of this frontend's."""
        self.queued_ts = times.queued
        self.scheduled_ts = times.scheduled
        self.num_preemptions = times.num_preemptions
        if self.first_token_ts is not None:
            self.first_token_ts = times.first_token
            self.last_token_ts = times.last_token


def merge_metrics(parts: list[RequestMetrics]) -> RequestMetrics:
    """Metrics of a request from those of its sequences: first of the firsts, last of the lasts, sums."""
    return RequestMetrics(
        arrival_time=parts[0].arrival_time,
        queued_ts=_lowest([part.queued_ts for part in parts]),
        scheduled_ts=_lowest([part.scheduled_ts for part in parts]),
        first_token_ts=_lowest([part.first_token_ts for part in parts]),
        last_token_ts=max(
            (part.last_token_ts for part in parts if part.last_token_ts is not None), default=None
        ),
        first_token_latency=_lowest([part.first_token_latency for part in parts]),
        num_generation_tokens=sum(part.num_generation_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
    )


def _lowest(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


class CompletionOutput(msgspec.Struct):
    """One generated sequence, or what is new of it (RequestOutputKind.DELTA).

    finish_reason: 'stop', 'length', 'repetition', 'abort', 'error', None while it runs. stop_reason: the stop
    string or stop token id that ended it, 'repetition_detected'; None for end-of-sequence.
    cumulative_logprob: of all tokens so far, when logprobs were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: LogprobsList | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    beam_score: float | None = None  # of a beam search: cumulative_logprob with the length penalty
    message: AssistantMessage | None = None  # of a chat with tools or thoughts: what `text` says

    def finished(self) -> bool:
        """Whether this is its last output."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """A request's result so far.

    prompt: None when the prompt was given as token ids. prompt_logprobs[0] is None. outputs: in the order of
    their index. num_cached_tokens: prompt tokens that the prefix cache already held. metrics: with the
    finished output. error: the cause, when a sequence ended with finish_reason 'error', and error_code its
    ErrorCode's name.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: LogprobsList | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    error_code: str | None = None

    def add_delta(self, later: RequestOutput) -> None:
        """Append what a later delta of the same request brings: a slow reader's queue stays one long."""
        by_index = {output.index: output for output in self.outputs}
        for new in later.outputs:
            old = by_index.get(new.index)
            if old is None:
                self.outputs.append(new)
                continue
            old.text += new.text
            old.token_ids += new.token_ids
            old.cumulative_logprob = new.cumulative_logprob
            if new.logprobs is not None:
                old.logprobs = old.logprobs.joined(new.logprobs) if old.logprobs is not None else new.logprobs
            old.finish_reason = new.finish_reason
            old.stop_reason = new.stop_reason
        self.outputs.sort(key=lambda output: output.index)
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finished = later.finished
        self.metrics = later.metrics
        self.error = self.error or later.error
        self.error_code = self.error_code or later.error_code
        if self.num_cached_tokens is None:
            self.num_cached_tokens = later.num_cached_tokens
