"""EngineCoreOutputs -> RequestOutputs: positions, text, stop strings, logprobs, sequences of a request.

One RequestState a sequence, one RequestGroup where a request has several. It trusts positions, not delivery:
tokens it already has are dropped, a gap fails the request. Knows no sockets; what the engine shall abort is
returned. Hot: process_outputs runs for every token of every request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

from ...ipc.errors import InputError
from ...ipc.params.sampling_params import RequestOutputKind
from ...ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from ..logprobs import LogprobsList, LogprobsTable, TokenText
from ..outputs import CompletionOutput, RequestMetrics, RequestOutput, merge_metrics
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .beam_search import SearchState
from .input_processor import EngineInput
from .vectors.state import PoolingInput, PoolingState

Sink = Callable[[Any], None]  # takes the outputs that its request has, of one kind or the other

_REPEATS = "repetition_detected"  # vLLM's stop_reason
_REASON_TEXTS = {reason: str(reason) for reason in FinishReason}


class Followup(NamedTuple):
    """What the engine shall end and begin after outputs were processed."""

    ids_to_abort: list[str]
    requests: list[EngineCoreRequest]


@dataclass(slots=True, eq=False)
class RequestState:
    """One sequence: what it has generated, and how much of that was delivered."""

    request: EngineInput
    index: int
    group: RequestGroup | None
    tokenizer: InitVar[Tokenizer | None]
    sink: Sink
    kind: RequestOutputKind = field(init=False)
    metrics: RequestMetrics = field(init=False)
    token_ids: list[int] = field(init=False)
    num_sent: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: str | None = None
    num_cached_tokens: int | None = None
    cumulative_logprob: float | None = None
    logprobs: LogprobsTable | None = None
    prompt_logprobs: LogprobsTable | None = None
    wants_logprobs: bool = field(init=False)
    max_prompt_logprobs: int = field(init=False)
    text_of: TokenText | None = None
    detokenizer: Detokenizer | None = None
    is_deferred: bool = field(init=False)

    def __post_init__(self, tokenizer: Tokenizer | None) -> None:
        request, params = self.request, self.request.params
        self.kind = params.output_kind
        self.token_ids = []
        self.wants_logprobs = params.logprobs is not None
        self.max_prompt_logprobs = len(request.prompt_token_ids) - 1
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        if tokenizer is not None and params.detokenize:
            self.text_of = tokenizer.token_text
            self.detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params)
        selects = self.group is not None and self.group.selects
        if selects:  # nothing can be told before the last sequence has ended
            self.kind = RequestOutputKind.FINAL_ONLY
        self.is_deferred = Detokenizer.can_wait(params) or (selects and not params.stop)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """The prompt's logprobs were asked for and are not complete, as they are with the first token."""
        is_asked = self.request.params.prompt_logprobs is not None
        return is_asked and not self.token_ids and self.finish_reason is None

    def take(self, output: EngineCoreOutput, now: float) -> None:
        """Merge what the engine sent; afterwards `finish_reason` says whether this sequence has ended."""
        new_ids = output.new_token_ids
        num_known = len(self.token_ids) - output.start
        if num_known:
            if num_known < 0:
                self.fail(f"tokens from {len(self.token_ids)} to {output.start - 1} never arrived")
                return
            new_ids = new_ids[num_known:]
        finish = output.finish_reason
        if new_ids:
            new_ids = self._decode(new_ids, finish)
            self.token_ids += new_ids
            metrics = self.metrics
            metrics.last_token_ts = now
            if metrics.first_token_ts is None:
                metrics.first_token_ts = now
                metrics.first_token_latency = now - metrics.arrival_time
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.logprobs is not None or output.prompt_logprobs is not None:
            self._take_logprobs(output, num_known)
        if finish is not None and self.finish_reason is None:
            self._finish(output, finish)

    def make_abort(self, engine_id: str) -> EngineCoreOutput:
        """What ends it with what it has."""
        return EngineCoreOutput(engine_id, len(self.token_ids), [], FinishReason.ABORT)

    def fail(self, cause: str) -> None:
        """End with an error."""
        self.finish_reason = _REASON_TEXTS[FinishReason.ERROR]
        self.error = cause
        self.metrics.num_generation_tokens = len(self.token_ids)

    def make_completion(self) -> CompletionOutput | None:
        """What the output kind wants to be delivered now; None when that is nothing."""
        is_finished = self.finish_reason is not None
        if self.kind == RequestOutputKind.DELTA:
            token_ids = self.token_ids[self.num_sent :]
            start = self.num_sent
            self.num_sent = len(self.token_ids)
            text = self.detokenizer.take_delta(is_finished) if self.detokenizer is not None else ""
            if not token_ids and not text and not is_finished:
                return None
        elif is_finished or self.kind == RequestOutputKind.CUMULATIVE:
            start = 0
            token_ids = self.token_ids if is_finished else self.token_ids.copy()
            text = self.detokenizer.sendable_text(is_finished) if self.detokenizer is not None else ""
        else:
            return None
        logprobs = None
        if self.logprobs is not None and self.wants_logprobs:
            logprobs = LogprobsList(self.logprobs, start, self.logprobs.num_positions, self.text_of)
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )

    def make_prompt_logprobs(self) -> LogprobsList | None:
        """The logprobs asked for of the prompt, once they are complete; for deltas, with the first only."""
        table = self.prompt_logprobs
        if self.max_prompt_logprobs == 0:
            table = table or LogprobsTable()
        if table is None or table.num_positions < self.max_prompt_logprobs:
            return None
        if self.kind == RequestOutputKind.DELTA:
            self.prompt_logprobs = None
        return LogprobsList(table, 0, table.num_positions, self.text_of, leads_with_none=True)

    def _decode(self, new_ids: list[int], finish: FinishReason | None) -> list[int]:
        """Turn new ids into text; returns them up to a stop string, where the sequence then ends."""
        detokenizer = self.detokenizer
        if detokenizer is None or self.is_deferred:
            return new_ids
        num_taken = detokenizer.add(self._find_shown(new_ids, finish))
        if detokenizer.stop_string is None:
            return new_ids
        self.finish_reason = _REASON_TEXTS[FinishReason.STOP]
        self.stop_reason = detokenizer.stop_string
        self.metrics.num_generation_tokens = len(self.token_ids) + num_taken
        return new_ids[:num_taken]

    def _find_shown(self, token_ids: list[int], finish: FinishReason | None) -> list[int]:
        """Those that are part of the text: a stop token is only if stop strings are."""
        hides_last = finish is FinishReason.STOP and not self.request.params.include_stop_str_in_output
        return token_ids[:-1] if hides_last else token_ids

    def _finish(self, output: EngineCoreOutput, finish: FinishReason) -> None:
        self.finish_reason = _REASON_TEXTS[finish]
        self.stop_reason = _REPEATS if finish is FinishReason.REPETITION else output.stop_reason
        self.error = output.error
        self.error_code = None if output.error_code is None else str(output.error_code)
        self.metrics.num_generation_tokens = len(self.token_ids)
        if output.times is not None:
            self.metrics.take_times(output.times)
        detokenizer = self.detokenizer
        if detokenizer is None:
            return
        if self.is_deferred:
            detokenizer.add_all(self._find_shown(self.token_ids, finish))
        else:
            detokenizer.finish()

    def _take_logprobs(self, output: EngineCoreOutput, num_known: int) -> None:
        if output.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = LogprobsTable()
            self.prompt_logprobs.add(
                output.prompt_logprobs, limit=self.max_prompt_logprobs - self.prompt_logprobs.num_positions
            )
        if output.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = LogprobsTable(is_ranked=not self.request.params.logprob_token_ids)
                self.cumulative_logprob = 0.0
            assert self.cumulative_logprob is not None
            self.cumulative_logprob += self.logprobs.add(
                output.logprobs, num_known, limit=len(self.token_ids) - self.logprobs.num_positions
            )


class RequestGroup:
    """The sequences of a request with n or best_of above 1.

    `selects`: more are generated than returned; the n with the highest cumulative logprob are delivered at
    the end, numbered in that order.
    """

    __slots__ = ("changed", "completions", "kind", "n", "num_live", "request", "selects", "states")

    def __init__(self, request: EngineInput) -> None:
        params = request.params
        self.request = request
        self.n = params.n
        self.num_live = len(request.sequences)
        self.selects = self.num_live > params.n
        self.kind = RequestOutputKind.FINAL_ONLY if self.selects else params.output_kind
        self.states: list[RequestState] = []
        self.completions: dict[int, CompletionOutput] = {}
        self.changed: dict[int, RequestState] = {}

    def take(self, state: RequestState) -> None:
        """Note that a sequence has changed."""
        self.changed[state.index] = state
        if state.finish_reason is not None:
            self.num_live -= 1

    def make_output(self) -> RequestOutput | None:
        """What is to be delivered now, None when nothing is."""
        if self.kind == RequestOutputKind.DELTA and self.states[0].awaits_prompt_logprobs:
            return None  # they come with the first output, and the others may be faster, with a cached prompt
        is_finished = self.num_live == 0
        for state in self.changed.values():
            completion = state.make_completion()
            if completion is not None:
                self.completions[completion.index] = completion
        self.changed = {}
        if not self.completions or (self.kind == RequestOutputKind.FINAL_ONLY and not is_finished):
            return None
        outputs = [self.completions[index] for index in sorted(self.completions)]
        if self.kind == RequestOutputKind.DELTA:
            self.completions = {}
        if self.selects:
            outputs = self._select(outputs)
        first = self.states[0]
        failed = next((state for state in self.states if state.error is not None), None)
        metrics = merge_metrics([state.metrics for state in self.states]) if is_finished else None
        return _make_output(first, outputs, is_finished, metrics, failed or first)

    def end(self) -> None:
        """No output is made any more; states and group do not hold each other until the collector comes."""
        self.states.clear()
        self.changed.clear()

    def _select(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        # A failed or aborted sequence counts after every one that ended by itself.
        def rank(output: CompletionOutput) -> tuple[bool, float]:
            logprob = output.cumulative_logprob
            return output.finish_reason in ("error", "abort"), -(logprob if logprob is not None else 0.0)

        chosen = sorted(outputs, key=rank)[: self.n]
        for index, output in enumerate(chosen):
            output.index = index
            if self.request.hides_cumulative_logprob:
                output.cumulative_logprob = None
        return chosen


class OutputProcessor:
    """All live requests of a frontend."""

    def __init__(self, tokenizer: Tokenizer | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        """monotonic: the clock of searches' timeouts."""
        self._tokenizer = tokenizer
        self._monotonic = monotonic
        self._states: dict[str, RequestState | PoolingState | SearchState] = {}  # by the engine's id
        self._engine_ids: dict[str, list[str]] = {}  # the user's id -> the engine's, live ones

    @property
    def num_unfinished(self) -> int:
        """Requests (not sequences) that have not had their final output."""
        return len(self._engine_ids)

    @property
    def request_ids(self) -> list[str]:
        """The user's ids of unfinished requests."""
        return list(self._engine_ids)

    def add_request(self, request: EngineInput | PoolingInput, sink: Sink) -> None:
        """Follow a request, whose outputs go to `sink`.

        Raises InputError when its id is already that of a live request.
        """
        request_id = request.request_id
        if request_id in self._engine_ids:
            raise InputError("request_id", request_id, "an id that no unfinished request has")
        if isinstance(request, PoolingInput):
            self._states[request.engine_id] = PoolingState(request, sink)
            self._engine_ids[request_id] = [request.engine_id]
            return
        if request.beam_search is not None:
            self._follow(SearchState(request, self._tokenizer, sink, self._monotonic))
            return
        group = RequestGroup(request) if len(request.sequences) > 1 else None
        for index, sequence in enumerate(request.sequences):
            state = RequestState(request, index, group, self._tokenizer, sink)
            if group is not None:
                group.states.append(state)
            self._states[sequence.request_id] = state
        self._engine_ids[request_id] = [sequence.request_id for sequence in request.sequences]

    def find_engine_ids(self, request_ids: Iterable[str]) -> list[str]:
        """The engine's ids of what is live of these requests; unknown and finished ones are left out."""
        return [engine_id for request_id in request_ids for engine_id in self._engine_ids.get(request_id, ())]

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests now, with what they have; returns what the engine shall end."""
        engine_ids = self.find_engine_ids(request_ids)
        self.process_outputs([self._states[engine_id].make_abort(engine_id) for engine_id in engine_ids])
        return engine_ids

    def forget_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Drop requests without a final output (their owner has gone); returns what the engine shall end."""
        engine_ids: list[str] = []
        for request_id in request_ids:
            engine_ids += self._engine_ids.pop(request_id, ())
        for engine_id in engine_ids:
            state = self._states.pop(engine_id, None)
            if isinstance(state, RequestState) and state.group is not None:
                state.group.end()
        return engine_ids

    def process_outputs(self, outputs: Sequence[EngineCoreOutput]) -> Followup:
        """Merge what the engine sent and deliver what that makes."""
        followup = Followup([], [])
        now = time.time()
        groups: dict[int, RequestState] = {}  # one state of each group that changed, by the group's identity
        states = self._states
        for output in outputs:
            state = states.get(output.request_id)
            if state is None:
                continue  # aborted here, and the engine did not know yet
            if not isinstance(state, RequestState):
                if isinstance(state, SearchState):
                    self._take_candidates(state, output, followup)
                elif (pooled := state.take(output)) is not None:
                    state.sink(pooled)
                    self._remove(output.request_id, state)
                continue
            state.take(output, now)
            if state.finish_reason is not None:
                if output.finish_reason is None:  # it ended here: a stop string, or a gap
                    followup.ids_to_abort.append(output.request_id)
                self._remove(output.request_id, state)
            elif state.kind == RequestOutputKind.FINAL_ONLY:
                continue
            if state.group is not None:
                state.group.take(state)
                groups[id(state.group)] = state
            elif (completion := state.make_completion()) is not None:
                is_finished = state.finish_reason is not None
                metrics = state.metrics if is_finished else None
                state.sink(_make_output(state, [completion], is_finished, metrics, state))
        for state in groups.values():
            assert state.group is not None
            if (made := state.group.make_output()) is not None:
                state.sink(made)
            if state.group.num_live == 0:
                state.group.end()
        return followup

    def _follow(self, state: SearchState) -> None:
        """Wait for the answers to a search's requests."""
        for sequence in state.requests:
            self._states[sequence.request_id] = state
        self._engine_ids[state.request.request_id] = [request.request_id for request in state.requests]

    def _take_candidates(self, state: SearchState, output: EngineCoreOutput, followup: Followup) -> None:
        before, result = state.requests, state.take(output)
        self._remove(output.request_id, state)
        if result is not None:
            followup.ids_to_abort.extend(self.forget_requests([result.request_id]))
            state.sink(result)
        elif state.requests is not before:
            self._follow(state)
            followup.requests.extend(state.requests)

    def _remove(self, engine_id: str, state: RequestState | PoolingState | SearchState) -> None:
        del self._states[engine_id]
        request_id = state.request.request_id
        live = self._engine_ids[request_id]
        live.remove(engine_id)
        if not live:
            del self._engine_ids[request_id]


def _make_output(
    first: RequestState,
    completions: list[CompletionOutput],
    is_finished: bool,
    metrics: RequestMetrics | None,
    failed: RequestState,
) -> RequestOutput:
    """`first`: the first sequence; `failed`: the one whose error, if it has any, is the request's."""
    request = first.request
    return RequestOutput(
        request.request_id,
        request.prompt,
        request.prompt_token_ids,
        first.make_prompt_logprobs() if request.params.prompt_logprobs is not None else None,
        completions,
        is_finished,
        metrics,
        first.num_cached_tokens,
        failed.error,
        failed.error_code,
    )
