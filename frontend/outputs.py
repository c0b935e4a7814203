"""What a user gets back: RequestOutput with one CompletionOutput a sequence. Field names are vLLM's."""

from __future__ import annotations

import msgspec

from .events import AssistantMessage
from .logprobs import LogprobsList
from .metrics import RequestMetrics


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
