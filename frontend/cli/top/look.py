"""One look at an engine: its snapshot, and what else a person asks: latencies, processes, device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from ....ipc.protocol.engine_views import EngineMetrics, EngineSnapshot, Histogram
from ....ipc.protocol.messages import EngineFacts
from ...llm_engine import LLMEngine

WINDOW_S = 60.0  # over which percentiles are taken
_METRICS_PERIOD_S = 2.0
_QUANTILES = (0.5, 0.95, 0.99)
_HISTOGRAMS = {"TTFT": "time_to_first_token_seconds", "ITL": "inter_token_latency_seconds"}
_POOLING_HISTOGRAMS = {"E2E": "e2e_request_latency_seconds"}  # of a model that generates nothing


class ProcessUsage(NamedTuple):
    """What the processes of an engine on this machine take."""

    cpu_percent: float  # of one core
    rss_bytes: int
    num_processes: int


class Look(NamedTuple):
    """What a frame shows."""

    snapshot: EngineSnapshot
    facts: EngineFacts
    usage: ProcessUsage | None  # None of another machine
    latencies: Mapping[str, tuple[float, ...] | None]  # seconds: p50, p95, p99 by name; None without any
    has_window: bool = False  # they are of the last WINDOW_S, not of all since the start


class Looker:
    """Looks at one engine again and again; `is_local` where its processes can be looked at too."""

    def __init__(self, engine: LLMEngine, is_local: bool) -> None:
        self.engine = engine
        self._is_local = is_local
        self._processes: dict[int, psutil.Process] = {}
        self._samples: deque[tuple[float, EngineMetrics]] = deque()

    def look(self) -> Look:
        """Ask for everything. Raises QuireErrors of an engine that has ended."""
        snapshot = self.engine.snapshot()
        facts = self.engine.facts_by_engine
        usage = self._measure_usage(facts) if self._is_local else None
        latencies = self._measure_latencies(snapshot)
        first = next(iter(facts.values()), self.engine.facts)
        return Look(snapshot, first, usage, latencies, len(self._samples) > 1)

    def _measure_latencies(self, snapshot: EngineSnapshot) -> dict[str, tuple[float, ...] | None]:
        samples = self._samples
        if samples and samples[-1][1].stats.num_steps_total > snapshot.stats.num_steps_total:
            samples.clear()  # another core counts from nothing
        if not samples or snapshot.at - samples[-1][0] >= _METRICS_PERIOD_S:
            samples.append((snapshot.at, self.engine.metrics()))
        while len(samples) > 2 and snapshot.at - samples[1][0] >= WINDOW_S:
            samples.popleft()
        before = samples[0][1].histograms if len(samples) > 1 else {}
        now = samples[-1][1].histograms
        can_generate = "generate" in self.engine.facts.tasks
        return {
            name: find_quantiles(now[key], before.get(key)) if key in now else None
            for name, key in (_HISTOGRAMS if can_generate else _POOLING_HISTOGRAMS).items()
        }

    def _measure_usage(self, facts: Mapping[int, EngineFacts]) -> ProcessUsage:
        """CPU time is that since the look before; the first one has none."""
        pids = {pid for one in facts.values() for pid in one.pids.values()}
        self._processes = {pid: process for pid, process in self._processes.items() if pid in pids}
        cpu, rss, count = 0.0, 0, 0
        for pid in pids:
            try:
                process = self._processes.setdefault(pid, psutil.Process(pid))
                cpu += process.cpu_percent()
                rss += process.memory_info().rss
                count += 1
            except psutil.Error:  # it has just ended
                self._processes.pop(pid, None)
        return ProcessUsage(cpu, rss, count)


def find_quantiles(now: Histogram, before: Histogram | None) -> tuple[float, ...] | None:
    """p50, p95, p99 of what was observed in between, as Prometheus estimates them: a bucket is taken as
    filled evenly, and the last has no end. None if nothing was.
    """
    counts = now.counts
    if before is not None and len(before.counts) == len(counts):
        counts = [new - old for new, old in zip(counts, before.counts, strict=True)]
    total = sum(counts)
    if total <= 0 or min(counts) < 0:
        return None
    return tuple(_find_quantile(now.bounds, counts, share * total) for share in _QUANTILES)


def _find_quantile(bounds: tuple[float, ...], counts: list[int], rank: float) -> float:
    below = 0
    for number, count in enumerate(counts):
        if count and below + count >= rank:
            start = bounds[number - 1] if number else 0.0
            end = bounds[number] if number < len(bounds) else start
            return start + (end - start) * (rank - below) / count
        below += count
    return bounds[-1]
