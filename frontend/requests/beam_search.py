"""Beam search by ordinary requests: a beam's next tokens are the logprobs of a request for one more token.

A round has a request a beam, which are answered together: beams of equal length keep each other's pace. What
they have in common is in the engine's prefix cache, and the block that is not full is, too (`is_continued`).
Without that cache every round computes all of its tokens: as right, and slow. For users names are vLLM's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...ipc.errors import RequestFailedError, SamplingParamsError
from ...ipc.params.beam_search import BeamSearchParams
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsBlock
from ..logprobs import Logprob, LogprobsList, LogprobsTable
from ..outputs import CompletionOutput, RequestMetrics, RequestOutput
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .beams import Candidates, Hypothesis, read_candidates
from .input_processor import EngineInput, InputProcessor, PreparedParams


class BeamSearchSequence(msgspec.Struct):
    """One sequence. tokens and text: prompt and output, as in vLLM; logprobs: each output token's own.

    score: cum_logprob over (number of output tokens) ** length_penalty; sequences are in its order.
    finish_reason: 'stop' at end-of-sequence, whose token counts in both though it is not shown, or 'length'.
    """

    tokens: list[int]
    logprobs: Sequence[dict[int, Logprob] | None]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None
    score: float


class BeamSearchOutput(msgspec.Struct):
    """The sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


def prepare_beam_search(processor: InputProcessor, params: Any) -> PreparedParams:
    """What the engine takes for `params`. Raises SamplingParamsError."""
    if not isinstance(params, BeamSearchParams):
        raise SamplingParamsError("params", params, "a BeamSearchParams")
    params.verify()
    sampling = SamplingParams(
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        temperature=0.0,
    )
    return processor.prepare_beam_search(sampling, params.to_search())


class SearchState:
    """A search on its way: takes the engine's answers to `requests`, then makes those of the next round."""

    def __init__(
        self,
        request: EngineInput,
        tokenizer: Tokenizer | None,
        sink: Callable[[Any], None],
        monotonic: Callable[[], float],
    ) -> None:
        """`request`: with the one request of the first round. `monotonic`: the clock of its timeout."""
        assert request.beam_search is not None
        self.request = request
        self.sink = sink
        self.requests = request.sequences  # of this round, in the order of the beams
        self._search = request.beam_search
        self._tokenizer = tokenizer
        self._monotonic = monotonic
        timeout_s = request.sequences[0].options.timeout_s
        self._timeout_at = None if timeout_s is None else monotonic() + timeout_s
        self._candidates: dict[str, Candidates] = {}  # by the engine's id
        self._metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._num_cached_tokens: int | None = None

    def make_abort(self, engine_id: str) -> EngineCoreOutput:
        """What ends it without its result."""
        return EngineCoreOutput(engine_id, self._search.num_rounds, [], FinishReason.ABORT)

    def take(self, output: EngineCoreOutput) -> RequestOutput | None:
        """The search's output if it has ended with this: other `requests` are then nobody's any more. Else it
        goes on, with other `requests` if this was the last answer of the round.
        """
        self._note(output)
        if output.logprobs is None:
            return self._make_failure(output)
        self._candidates[output.request_id] = read_candidates(output.logprobs)
        if len(self._candidates) < len(self.requests):
            return None
        candidates, self._candidates = self._candidates, {}
        self._search.advance([candidates[request.request_id] for request in self.requests])
        if self._search.is_done:
            return self._make_output()
        left_s = None if self._timeout_at is None else self._timeout_at - self._monotonic()
        if left_s is not None and left_s <= 0:
            return self._make_failure(self.make_abort(output.request_id))
        self.requests = self._make_requests(left_s)
        return None

    def _make_requests(self, timeout_s: float | None) -> list[EngineCoreRequest]:
        first, num_rounds = self.request.sequences[0], self._search.num_rounds
        params = copy.copy(first.sampling_params)
        params.max_tokens = num_rounds + 1
        options = first.options
        if timeout_s is not None:
            options = msgspec.structs.replace(options, timeout_s=timeout_s)
        return [
            msgspec.structs.replace(
                first,
                request_id=f"{place}_{num_rounds}_{first.request_id}",
                sampling_params=params,
                output_token_ids=beam.token_ids.tobytes(),
                options=options,
                num_sequences=0,
            )
            for place, beam in enumerate(self._search.running)
        ]

    def _note(self, output: EngineCoreOutput) -> None:
        metrics = self._metrics
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        times = output.times
        if times is None:
            return
        metrics.num_preemptions += times.num_preemptions
        if metrics.queued_ts is None:
            metrics.queued_ts, metrics.scheduled_ts = times.queued, times.scheduled
            metrics.first_token_ts = times.first_token
            metrics.first_token_latency = times.first_token - metrics.arrival_time
        metrics.last_token_ts = times.last_token

    def _make_output(self) -> RequestOutput:
        completions = [
            _make_completion(self.request, index, hypothesis, self._tokenizer)
            for index, hypothesis in enumerate(self._search.finished)
        ]
        self._metrics.num_generation_tokens = sum(len(completion.token_ids) for completion in completions)
        return self._wrap(completions)

    def _make_failure(self, output: EngineCoreOutput) -> RequestOutput:
        reason = FinishReason.ERROR if output.finish_reason is None else output.finish_reason
        code = None if output.error_code is None else str(output.error_code)
        return self._wrap([CompletionOutput(0, "", [], finish_reason=str(reason))], output.error, code)

    def _wrap(
        self, completions: list[CompletionOutput], error: str | None = None, code: str | None = None
    ) -> RequestOutput:
        request, cached = self.request, self._num_cached_tokens
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            None,
            completions,
            True,
            self._metrics,
            cached,
            error,
            code,
        )


def _make_completion(
    request: EngineInput, index: int, hypothesis: Hypothesis, tokenizer: Tokenizer | None
) -> CompletionOutput:
    beam, reason = hypothesis.beam, hypothesis.finish_reason
    token_ids = beam.token_ids.tolist()
    table = LogprobsTable()
    table.add(
        LogprobsBlock(
            len(token_ids), 1, beam.token_ids.tobytes(), beam.logprobs.tobytes(), beam.ranks.tobytes()
        )
    )
    is_cut = reason is FinishReason.STOP and not request.params.include_stop_str_in_output
    text = ""
    if tokenizer is not None:
        detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, request.params)
        detokenizer.add_all(token_ids[:-1] if is_cut else token_ids)
        text = detokenizer.sendable_text(True)
    text_of = None if tokenizer is None else tokenizer.token_text
    return CompletionOutput(
        index,
        text,
        token_ids,
        beam.cumulative_logprob,
        LogprobsList(table, 0, table.num_positions, text_of),
        str(reason),
        None,
        hypothesis.score,
    )


def to_beam_search_output(
    output: RequestOutput, tokenizer: Tokenizer | None, shows_eos: bool
) -> BeamSearchOutput:
    """The answer to LLM.beam_search. Raises RequestFailedError if the engine has failed the request."""
    if output.error is not None:
        raise RequestFailedError(output.error, output.error_code)
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
    sequences = [
        BeamSearchSequence(
            output.prompt_token_ids + _cut(completion, shows_eos),
            completion.logprobs or [],
            completion.cumulative_logprob or 0.0,
            None if prompt is None else prompt + completion.text,
            completion.finish_reason,
            completion.stop_reason,
            completion.beam_score or 0.0,
        )
        for completion in output.outputs
    ]
    return BeamSearchOutput(sequences)


def _cut(completion: CompletionOutput, shows_eos: bool) -> list[int]:
    has_eos = completion.finish_reason == "stop" and not shows_eos
    return completion.token_ids[:-1] if has_eos else completion.token_ids
