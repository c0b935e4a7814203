"""Which requests a screen shows, in which order, and what keys change of that. Knows no screen.

The selected request stays selected when the list moves; when it has ended, the one in its place is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import psutil

from ....ipc.protocol.engine_views import EngineMetrics, EngineSnapshot, Histogram, RequestView
from ....ipc.protocol.messages import EngineFacts
from ...llm_engine import LLMEngine

# What rows can be sorted by; of numbers the largest come first.
SORTS: dict[str, Callable[[RequestView], Any]] = {
    "request": lambda view: view.request_id,
    "state": lambda view: view.state,
    "progress": lambda view: -view.num_output_tokens / max(1, view.max_total_tokens - view.num_prompt_tokens),
    "tokens": lambda view: -(view.num_prompt_tokens + view.num_output_tokens),
    "holds": lambda view: -view.held_bytes,
    "age": lambda view: -view.age_s,
}
ENGINES_ORDER = "engine"  # running ones, then in the order in which they will run
SORT_NAMES = (ENGINES_ORDER, *SORTS)


class Mode(Enum):
    """What keys are for."""

    LIST = auto()
    HELP = auto()
    CONFIRM = auto()  # of a cancellation


class Action(Enum):
    """What a key asks of who shows the screen."""

    LEAVE = auto()
    CANCEL = auto()  # the request View.to_cancel
    NEXT_ENGINE = auto()


@dataclass
class View:
    """Of one engine."""

    sort: str = ENGINES_ORDER
    selected: str | None = None  # its request_id
    to_cancel: str = ""  # the request that is to be cancelled if the answer is yes
    mode: Mode = Mode.LIST
    message: str = ""  # until the next key
    page_size: int = 1  # rows on the screen, as it was drawn last
    _place: int = 0  # of the selected one when it was last seen
    _offset: int = 0  # of the first row on the screen

    @property
    def is_plain(self) -> bool:
        """Whether nobody has asked for more than the first requests of both kinds."""
        return self.sort == ENGINES_ORDER and self.selected is None

    def order(self, requests: Sequence[RequestView]) -> list[RequestView]:
        """All rows, sorted."""
        key = SORTS.get(self.sort)
        return list(requests) if key is None else sorted(requests, key=key)

    def place_rows(self, rows: Sequence[RequestView], num_rows: int) -> int:
        """The number of the first row to show, so that the selected one is among `num_rows`."""
        self.page_size = max(1, num_rows)
        if self.selected is not None:
            self._follow(rows)
            self._offset = max(min(self._offset, self._place), self._place - self.page_size + 1)
        self._offset = max(0, min(self._offset, len(rows) - self.page_size))
        return self._offset

    def press(self, key: str, requests: Sequence[RequestView]) -> Action | None:
        """Take a key: a character, or the name of one such as 'up'."""
        self.message = ""
        match self.mode:
            case Mode.HELP:
                self.mode = Mode.LIST
                return Action.LEAVE if key == "q" else None
            case Mode.CONFIRM:
                self.mode = Mode.LIST
                if key in ("y", "Y"):
                    return Action.CANCEL
                self.message = "not cancelled"
                return None
            case Mode.LIST:
                return self._press_in_list(key, self.order(requests))

    def _press_in_list(self, key: str, rows: Sequence[RequestView]) -> Action | None:
        match key:
            case "q" | "Q":
                return Action.LEAVE
            case "\t":
                return Action.NEXT_ENGINE
            case "h" | "?":
                self.mode = Mode.HELP
            case "s":
                self.sort = SORT_NAMES[(SORT_NAMES.index(self.sort) + 1) % len(SORT_NAMES)]
                self.message = f"sorted by {self.sort}"
            case "esc":
                self.selected, self._offset = None, 0
            case "c":
                self._ask_to_cancel(rows)
            case "up" | "k":
                self._move(rows, -1)
            case "down" | "j":
                self._move(rows, 1)
            case "pgup":
                self._move(rows, -self.page_size)
            case "pgdn":
                self._move(rows, self.page_size)
            case _:
                self.message = "h: help"
        return None

    def _ask_to_cancel(self, rows: Sequence[RequestView]) -> None:
        self._follow(rows)
        if self.selected is None:
            self.message = "up and down select a request"
        else:
            self.to_cancel, self.mode = self.selected, Mode.CONFIRM

    def _move(self, rows: Sequence[RequestView], step: int) -> None:
        if not rows:
            return
        if self.selected is None:
            self._place = 0
        else:
            self._follow(rows)
            self._place = max(0, min(len(rows) - 1, self._place + step))
        self.selected = rows[self._place].request_id

    def _follow(self, rows: Sequence[RequestView]) -> None:
        """Find the selected one again."""
        if self.selected is None:
            return
        for place, row in enumerate(rows):
            if row.request_id == self.selected:
                self._place = place
                return
        self._place = max(0, min(self._place, len(rows) - 1))
        self.selected = rows[self._place].request_id if rows else None


# One look at an engine: its snapshot, and what else a person asks: latencies, processes, device.

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


class FrameData(NamedTuple):
    """What a frame shows."""

    snapshot: EngineSnapshot
    facts: EngineFacts
    usage: ProcessUsage | None  # None of another machine
    latencies: Mapping[str, tuple[float, ...] | None]  # seconds: p50, p95, p99 by name; None without any
    has_window: bool = False  # they are of the last WINDOW_S, not of all since the start


class EngineWatcher:
    """Looks at one engine again and again; `is_local` where its processes can be looked at too."""

    def __init__(self, engine: LLMEngine, is_local: bool) -> None:
        self.engine = engine
        self._is_local = is_local
        self._processes: dict[int, psutil.Process] = {}
        self._samples: deque[tuple[float, EngineMetrics]] = deque()

    def look(self) -> FrameData:
        """Ask for everything. Raises QuireErrors of an engine that has ended."""
        snapshot = self.engine.snapshot()
        facts = self.engine.facts_by_engine
        usage = self._measure_usage(facts) if self._is_local else None
        latencies = self._measure_latencies(snapshot)
        first = next(iter(facts.values()), self.engine.facts)
        return FrameData(snapshot, first, usage, latencies, len(self._samples) > 1)

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
        pids = {pid for engine in facts.values() for pid in engine.pids.values()}
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
