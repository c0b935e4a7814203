"""What an engine core counts: plain sums, rates over the last seconds, histograms; and what its log is told.

Nothing here reads a clock or knows the scheduler. The per-step parts cost well under a microsecond a request;
everything else is paid by whoever looks (`EngineCore.snapshot` and `EngineCore.metrics`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import msgspec

from ...ipc.protocol.engine_views import EngineMetrics, Histogram, SchedulerStats
from ...ipc.protocol.messages import FinishReason
from ..kv.prefix_misses import PrefixMiss
from ..scheduling.request import Request, RequestKind

WINDOW_S = 5.0  # what rates are taken over
_SAMPLE_PERIOD_S = 0.5
_MIN_SPAN_S = 0.5  # a rate over less says more about the clock than about the engine

# vLLM's bounds, so that its users' dashboards and alerts fit; latencies have more, as a vector takes 3 ms.
_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BOUNDS = (
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_NUM_SEQUENCES_BOUNDS = (1, 2, 5, 10, 20)
_STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class EngineCounters:
    """Only grow within an epoch. SchedulerStats has the same names with `_total`."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    prefix_misses_unknown: int = 0  # tokens of whole blocks that were not found, by PrefixMiss
    prefix_misses_evicted: int = 0
    prefix_misses_other_salt: int = 0
    prefix_misses_no_state: int = 0
    prompt_tokens: int = 0  # computed in prefill, after preemption again; cached ones not
    generation_tokens: int = 0
    row_work_s: float = 0.0  # of the worker, that rows took for themselves: grammars, processors, logprobs
    schedule_s: float = 0.0
    update_s: float = 0.0
    step_wait_s: float = 0.0  # blocked on the executor with work in flight; counted by the busy loop

    def count_miss(self, reason: PrefixMiss, num_tokens: int) -> None:
        """`num_tokens` tokens were looked up and not found."""
        match reason:
            case PrefixMiss.UNKNOWN:
                self.prefix_misses_unknown += num_tokens
            case PrefixMiss.EVICTED:
                self.prefix_misses_evicted += num_tokens
            case PrefixMiss.NO_STATE:
                self.prefix_misses_no_state += num_tokens
            case PrefixMiss.OTHER_SALT:
                self.prefix_misses_other_salt += num_tokens


class Rates(NamedTuple):
    """Means over the window, named as in EngineSnapshot; all 0 when nothing ran in it."""

    prompt_tokens_per_s: float = 0.0
    generation_tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    schedule_ms: float = 0.0  # a step; so are the next two
    update_ms: float = 0.0
    step_wait_ms: float = 0.0


class _Sample(NamedTuple):
    """The counters just before the engine's work changed them at time `at`."""

    at: float
    is_start: bool  # nothing was in flight before, so the time before it counts for nothing
    counters: EngineCounters


class RateWindow:
    """Samples of the counters, at most one each half second and none while the engine is idle."""

    def __init__(self, counters: EngineCounters, on_sample: Callable[[float, bool], None]) -> None:
        """`on_sample(now, is_start)` is called with each sample."""
        self._counters = counters
        self._on_sample = on_sample
        self._samples: deque[_Sample] = deque(maxlen=int(WINDOW_S / _SAMPLE_PERIOD_S) + 2)
        self._sampled_at = 0.0
        self._next_at = 0.0

    def note(self, now: float, is_start: bool) -> None:
        """Called around every step before it changes the counters."""
        if self._sampled_at <= now < self._next_at:  # a clock that is set back samples at once
            return
        self._sampled_at, self._next_at = now, now + _SAMPLE_PERIOD_S
        self._samples.append(_Sample(now, is_start, replace(self._counters)))
        self._on_sample(now, is_start)

    def measure(self, now: float) -> Rates:
        """Rates from the oldest sample in the window up to `now`."""
        base = next((sample for sample in self._samples if 0.0 <= now - sample.at <= WINDOW_S), None)
        if base is None:
            return Rates()
        counters, before = self._counters, base.counters
        # Counters stand still between samples when the engine is slow, so the first one stands for the
        # whole window, unless the engine was idle until then.
        span_s = max(now - base.at, _MIN_SPAN_S) if base.is_start else WINDOW_S
        num_steps = counters.num_steps - before.num_steps
        per_step_ms = 1e3 / num_steps if num_steps else 0.0
        return Rates(
            prompt_tokens_per_s=(counters.prompt_tokens - before.prompt_tokens) / span_s,
            generation_tokens_per_s=(counters.generation_tokens - before.generation_tokens) / span_s,
            steps_per_s=num_steps / span_s,
            schedule_ms=(counters.schedule_s - before.schedule_s) * per_step_ms,
            update_ms=(counters.update_s - before.update_s) * per_step_ms,
            step_wait_ms=(counters.step_wait_s - before.step_wait_s) * per_step_ms,
        )


class Observations:
    """The engine's histograms and the ends of its requests; names and meaning are vLLM's.

    A time of a request is observed when it ends and if it produced a token here; its time to first token when
    that token comes, if it is the first at all and not of a request that another engine began.
    """

    def __init__(self, max_model_len: int) -> None:
        lengths = list(_one_two_five(max_model_len))
        bounds: dict[str, Sequence[float]] = {
            "time_to_first_token_seconds": _FIRST_TOKEN_BOUNDS,
            "inter_token_latency_seconds": _INTER_TOKEN_BOUNDS,
            "e2e_request_latency_seconds": _LATENCY_BOUNDS,
            "request_queue_time_seconds": _LATENCY_BOUNDS,
            "request_prefill_time_seconds": _LATENCY_BOUNDS,
            "request_decode_time_seconds": _LATENCY_BOUNDS,
            "request_inference_time_seconds": _LATENCY_BOUNDS,
            "request_prompt_tokens": lengths,
            "request_generation_tokens": lengths,
            "request_max_num_generation_tokens": lengths,
            "request_params_max_tokens": lengths,
            "request_params_n": _NUM_SEQUENCES_BOUNDS,
            "iteration_tokens_total": _STEP_TOKEN_BOUNDS,
        }
        self._histograms = {
            name: Histogram(bounds=tuple(values), counts=[0] * (len(values) + 1))
            for name, values in bounds.items()
        }
        self._finished = dict.fromkeys(FinishReason, 0)
        self.tool_parse_errors_total = self.reasoning_tokens_total = 0  # as frontends say
        self._finished_by_kind: dict[str, int] = dict.fromkeys(get_args(RequestKind), 0)

    def sum_latencies(self) -> dict[str, float]:
        """Times to first and between tokens, and how many; named as in HistoryPoint."""
        first, gap = (
            self._histograms[f"{name}_seconds"] for name in ("time_to_first_token", "inter_token_latency")
        )
        counts = {"num_first_tokens": sum(first.counts), "num_gaps": sum(gap.counts)}
        return {**counts, "first_token_s": first.sum, "gap_s": gap.sum}

    def observe_step(self, num_tokens: int) -> None:
        """A step's result is in; it computed `num_tokens`."""
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def observe_gap(self, gap_s: float, times: int = 1) -> None:
        """`times` tokens came `gap_s` after the one before of the same request."""
        self._histograms["inter_token_latency_seconds"].observe(gap_s, times)

    def observe_first_token(self, request: Request, now: float) -> None:
        """A request's very first token is here."""
        self._histograms["time_to_first_token_seconds"].observe(now - request.arrival_time)

    def observe_refusal(self) -> None:
        """A request was answered with ERROR without being taken on."""
        self._finished[FinishReason.ERROR] += 1

    def observe_finish(self, request: Request) -> None:
        """A live request has its finish_reason."""
        assert request.finish_reason is not None
        if request.is_continued and not request.num_sequences:
            return  # a further part of what its user waits for, which counts once
        self._finished[request.finish_reason] += 1
        self._finished_by_kind[request.kind] += 1
        if request.is_continued:
            return  # its times and lengths are of a part
        observed: dict[str, float] = {
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_generation_tokens": request.num_output_tokens,
        }
        if request.pooling_params is None:
            observed["request_max_num_generation_tokens"] = request.num_output_tokens
            observed["request_params_max_tokens"] = request.max_total_tokens - request.num_prompt_tokens
        if request.num_sequences:
            observed["request_params_n"] = request.num_sequences
        scheduled, first, last = request.scheduled_time, request.first_token_time, request.last_token_time
        if scheduled is not None and first is not None:
            observed |= {
                "e2e_request_latency_seconds": last - request.arrival_time,
                "request_queue_time_seconds": scheduled - request.queued_time,
                "request_prefill_time_seconds": first - scheduled,
                "request_decode_time_seconds": last - first,
                "request_inference_time_seconds": last - scheduled,
            }
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def to_message(self, stats: SchedulerStats, cache_config: dict[str, str]) -> EngineMetrics:
        """A copy for the wire, beside `stats`; every finish reason and every kind is present."""
        return EngineMetrics(
            stats=stats,
            histograms={
                name: msgspec.structs.replace(histogram, counts=histogram.counts.copy())
                for name, histogram in self._histograms.items()
            },
            finished_total={str(reason): count for reason, count in self._finished.items()},
            finished_by_kind_total=self._finished_by_kind.copy(),
            tool_parse_errors_total=self.tool_parse_errors_total,
            reasoning_tokens_total=self.reasoning_tokens_total,
            cache_config=cache_config,
        )


def _one_two_five(highest: int) -> Iterable[int]:
    """1, 2, 5, 10, 20, 50, ... up to `highest`."""
    series = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return itertools.takewhile(lambda value: value <= highest, series)


PERIOD_S = 10.0


class ThrottledLog:
    """Log lines on requests that were refused or cost much: at most one of each kind in PERIOD_S.

    `clock` is monotonic. A text must hold nothing of a prompt.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: dict[str, tuple[int, str]] = {}  # kind -> (how many, the last one's text)
        self._due_at: dict[str, float] = {}

    def note(self, kind: str, text: str) -> None:
        """Add a line of a kind; `take` returns the last one, and how many came before it."""
        count, _ = self._pending.get(kind, (0, ""))
        self._pending[kind] = (count + 1, text)

    def take(self) -> list[str]:
        """The lines that are due."""
        if not self._pending:
            return []
        now = self._clock()
        due = [kind for kind in self._pending if now >= self._due_at.get(kind, now)]
        lines: list[str] = []
        for kind in due:
            count, text = self._pending.pop(kind)
            self._due_at[kind] = now + PERIOD_S
            lines.append(f"{kind}: {text}" + (f" (and {count - 1} more before it)" if count > 1 else ""))
        return lines
