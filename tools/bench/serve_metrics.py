"""From request records to figures: throughput, latency percentiles, goodput. Pure; names are vLLM's.

TTFT: from when a request was due to its first text. ITL: between two pieces of text. TPOT: from the first
text to the last, over the tokens after the first. E2EL: from when it was due to its last text.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...ipc.errors import InputError
from .load import LoadResult, RequestRecord

# Metric -> its heading. Keys of --goodput, with 'e2e' for e2el.
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_GOODPUT_ALLOWED = "NAME:MILLISECONDS with NAME one of ttft, tpot, itl, e2e"


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """One metric over all answered requests, in ms; None where nothing was measured."""

    count: int
    mean: float
    std: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ServeMetrics:
    """The figures of a run. Rates are over its duration; failed requests count in `failed` only."""

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    is_counted_by_server: bool  # output tokens; else they are pieces of text
    max_concurrent_requests: int
    request_goodput: float | None  # answered within every limit, requests/s; None: no limits were given
    latencies: dict[str, LatencySummary | None]
    errors: dict[str, int]  # reason -> how often, the most frequent first

    @property
    def request_throughput(self) -> float:
        """Answered requests/s."""
        return _divide(self.completed, self.duration_s)

    @property
    def output_throughput(self) -> float:
        """Output tokens/s."""
        return _divide(self.total_output_tokens, self.duration_s)

    @property
    def total_token_throughput(self) -> float:
        """Prompt and output tokens/s."""
        return _divide(self.total_input_tokens + self.total_output_tokens, self.duration_s)

    def to_json(self) -> dict[str, Any]:
        """Flat, with the keys of vLLM's result file, and p90 and max beside its p99."""
        flat: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
        }
        for name, summary in self.latencies.items():
            for statistic in ("mean", "median", "std", "p90", "p99", "max"):
                value = None if summary is None else getattr(summary, statistic)
                flat[f"{statistic}_{name}_ms"] = value
        return flat | {"error_counts": self.errors}


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """['ttft:200', 'e2e:2000'] as metric -> seconds. Raises InputError."""
    limits: dict[str, float] = {}
    for word in words:
        name, separator, text = word.partition(":")
        name = "e2el" if name == "e2e" else name
        try:
            limit_ms = float(text)
        except ValueError:
            limit_ms = math.nan
        if name not in METRICS or not separator or not 0 < limit_ms < math.inf:
            raise InputError("goodput", word, _GOODPUT_ALLOWED)
        if name in limits:
            raise InputError("goodput", word, "each name once")
        limits[name] = limit_ms / 1e3
    return limits


def compute_metrics(result: LoadResult, limits_s: dict[str, float]) -> ServeMetrics:
    """The figures of a run, with its goodput where there are limits."""
    answered = [record for record in result.records if record.error is None]
    errors = Counter(record.error for record in result.records if record.error is not None)
    samples = {name: [s for record in answered for s in measure(record, name)] for name in METRICS}
    num_good = sum(is_good(record, limits_s) for record in answered)
    return ServeMetrics(
        completed=len(answered),
        failed=len(result.records) - len(answered),
        duration_s=result.duration_s,
        total_input_tokens=sum(record.num_prompt_tokens for record in answered),
        total_output_tokens=sum(record.num_output_tokens for record in answered),
        is_counted_by_server=all(record.has_usage for record in answered),
        max_concurrent_requests=count_most_at_once(result.records),
        request_goodput=_divide(num_good, result.duration_s) if limits_s else None,
        latencies={name: summarize(values) for name, values in samples.items()},
        errors=dict(errors.most_common()),
    )


def measure(record: RequestRecord, name: str) -> list[float]:
    """What an answered request gives to a metric, in seconds: one value, each gap for itl, or nothing."""
    times = record.text_times
    if record.first_at is None:
        return [record.ended_at - record.due_at] if name == "e2el" else []
    if name == "ttft":
        return [record.first_at - record.due_at]
    if name == "e2el":
        return [times[-1] - record.due_at]
    if name == "itl":
        return [after - before for before, after in pairwise(times)]
    return [(times[-1] - times[0]) / (record.num_output_tokens - 1)] if record.num_output_tokens > 1 else []


def is_good(record: RequestRecord, limits_s: dict[str, float]) -> bool:
    """Whether an answered request kept every limit; for itl, in every gap."""
    return all(value <= limit for name, limit in limits_s.items() for value in measure(record, name))


def summarize(values_s: Sequence[float]) -> LatencySummary | None:
    """Seconds in, milliseconds out."""
    if not values_s:
        return None
    values = sorted(value * 1e3 for value in values_s)
    mean = statistics.fmean(values)
    std = math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))
    median, p90, p99 = (compute_percentile(values, share) for share in (0.5, 0.9, 0.99))
    return LatencySummary(len(values), mean, std, median, p90, p99, values[-1])


def compute_percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the ordered values, as numpy's default is."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def count_most_at_once(records: Sequence[RequestRecord]) -> int:
    """The most requests that were sent and not yet answered at one time."""
    starts = [(record.sent_at, 1) for record in records]
    most = running = 0
    for _, change in sorted(starts + [(record.ended_at, -1) for record in records]):
        running += change
        most = max(most, running)
    return most


def _divide(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
