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
Summary = dict[str, float]  # statistic -> ms


@dataclass(frozen=True, slots=True)
class ServeMetrics:
    """The figures of a run. Rates are over its duration; failed requests count in `failed` only."""

    figures: dict[str, Any]  # by the names of vLLM's result file
    is_counted_by_server: bool  # output tokens; else they are pieces of text
    latencies: dict[str, Summary | None]  # by metric; None where nothing was measured
    errors: dict[str, int]  # reason -> how often, the most frequent first

    def to_json(self) -> dict[str, Any]:
        """Flat, with the keys of vLLM's result file, and p90 and max beside its p99."""
        flat = {
            f"{statistic}_{name}_ms": None if summary is None else summary[statistic]
            for name, summary in self.latencies.items()
            for statistic in ("mean", "median", "std", "p90", "p99", "max")
        }
        return self.figures | flat | {"error_counts": self.errors}


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
    """The figures of a run; its goodput are the requests that were answered within every limit."""
    answered = [record for record in result.records if record.error is None]
    errors = Counter(record.error for record in result.records if record.error is not None)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    num_output_tokens = sum(record.num_output_tokens for record in answered)
    num_good = sum(
        all(value <= limit for name, limit in limits_s.items() for value in measure(record, name))
        for record in answered
    )
    duration_s = result.duration_s or math.inf
    return ServeMetrics(
        figures={
            "duration": result.duration_s,
            "completed": len(answered),
            "failed": len(result.records) - len(answered),
            "total_input_tokens": num_prompt_tokens,
            "total_output_tokens": num_output_tokens,
            "request_throughput": len(answered) / duration_s,
            "request_goodput": num_good / duration_s if limits_s else None,
            "output_throughput": num_output_tokens / duration_s,
            "total_token_throughput": (num_prompt_tokens + num_output_tokens) / duration_s,
            "max_concurrent_requests": _count_most_at_once(result.records),
        },
        is_counted_by_server=all(record.has_usage for record in answered),
        latencies={
            name: summarize([value for record in answered for value in measure(record, name)])
            for name in METRICS
        },
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


def summarize(values_s: Sequence[float]) -> Summary | None:
    """Seconds in, milliseconds out; None of no values."""
    if not values_s:
        return None
    values = sorted(value * 1e3 for value in values_s)
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    percentiles = {name: compute_percentile(values, share) for name, share in shares.items()}
    return {"mean": statistics.fmean(values), "std": statistics.pstdev(values), **percentiles}


def compute_percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of the ordered values, as numpy's default is."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _count_most_at_once(records: Sequence[RequestRecord]) -> int:
    """The most requests that were sent and not yet answered at one time."""
    changes = [(record.sent_at, 1) for record in records] + [(record.ended_at, -1) for record in records]
    most = running = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
