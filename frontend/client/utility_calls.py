"""Calls about engines rather than a request: what they count, hold, forget.

Of several engines every one that is there is asked. An answer is of all together, or `_by_engine` of each.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import RequestFailedError
from ...ipc.protocol.engine_views import (
    ClientView,
    EngineHistory,
    EngineLoad,
    EngineMetrics,
    EngineSnapshot,
    Histogram,
    SchedulerStats,
)
from ...ipc.protocol.messages import UtilityMethod, UtilityResult
from ..observe.trace_file import DEFAULT_FOLDER, write_trace


class UtilityCalls(ABC):
    """All raise EngineDeadError, and RequestFailedError without an answer in time."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prompt beginnings; False while requests hold them."""
        return _find_errors(await self.call_each(UtilityMethod.RESET_PREFIX_CACHE)) is None

    async def stats(self) -> SchedulerStats:
        """A look at the engine at this moment."""
        return merge_stats(list((await self.stats_by_engine()).values()))

    async def stats_by_engine(self) -> dict[int, SchedulerStats]:
        """A look at each engine."""
        return _expect(await self.call_each(UtilityMethod.STATS), "stats")

    async def snapshot(self) -> EngineSnapshot:
        """What live views show: requests, blocks, clients, and rates over the last seconds."""
        return merge_snapshots(await self.snapshot_by_engine())

    async def snapshot_by_engine(self) -> dict[int, EngineSnapshot]:
        """What live views show of each engine."""
        return _expect(await self.call_each(UtilityMethod.SNAPSHOT), "snapshot")

    async def metrics(self) -> EngineMetrics:
        """What the engine has counted since it started, over all its clients."""
        return merge_metrics(list((await self.metrics_by_engine()).values()))

    async def metrics_by_engine(self) -> dict[int, EngineMetrics]:
        """What each engine has counted since it started."""
        return _expect(await self.call_each(UtilityMethod.METRICS), "metrics")

    async def history_by_engine(self) -> dict[int, EngineHistory]:
        """What each engine did in the last quarter of an hour."""
        return _expect(await self.call_each(UtilityMethod.HISTORY), "history")

    async def start_profile(self) -> None:
        """Have the engine note when each step is scheduled, computed and taken in, until `stop_profile`.

        Raises RequestFailedError if somebody does so already.
        """
        _raise_errors(await self.call_each(UtilityMethod.START_PROFILE))

    async def stop_profile(self, folder: str = DEFAULT_FOLDER) -> Path:
        """Write what was noted to a new file in `folder`, which ui.perfetto.dev opens, and say which.

        Raises RequestFailedError if no profile was started, or the engine was lost since.
        """
        traces = _expect(await self.call_each(UtilityMethod.STOP_PROFILE), "trace")
        return await asyncio.to_thread(write_trace, traces, folder)

    async def check_integrity(self) -> str | None:
        """What is wrong with the engine's block accounting, None if nothing is."""
        return _find_errors(await self.call_each(UtilityMethod.CHECK_INTEGRITY))

    @abstractmethod
    async def call_each(self, method: UtilityMethod) -> dict[int, UtilityResult]:
        """Call every engine that is there; the answer of one that is lost meanwhile is an error."""


def _find_errors(results: Mapping[int, UtilityResult]) -> str | None:
    """What the engines that have answered complain of, None if none does."""
    if len(results) == 1:
        return next(iter(results.values())).error
    errors = [f"engine {index}: {result.error}" for index, result in results.items() if result.error]
    return "; ".join(errors) or None


def _raise_errors(results: Mapping[int, UtilityResult]) -> None:
    if error := _find_errors(results):
        raise RequestFailedError(error)


def _expect(results: Mapping[int, UtilityResult], field: str) -> dict[int, Any]:
    """The answers; an engine that was lost meanwhile has none, unless it is the last."""
    answers = {index: getattr(result, field) for index, result in results.items()}
    values = {index: answer for index, answer in answers.items() if answer is not None}
    if not values:
        error = next((result.error for result in results.values()), None)
        raise RequestFailedError(error or f"the engine gave no {field}")
    return values


_RATES = ("prompt_tokens_per_s", "generation_tokens_per_s", "steps_per_s")
_STEP_TIMES = ("schedule_ms", "update_ms", "step_wait_ms")
_CLIENT_SUMS = ("num_running", "num_waiting", "tokens_served_total", "num_unsent")


def merge_stats(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """Sums; a client is attached to each engine and counts once. `stall`: the longest."""
    if len(parts) == 1:
        return parts[0]
    stalls = [part.stall for part in parts if part.stall is not None]
    sums = {
        name: sum(getattr(part, name) for part in parts)
        for name in SchedulerStats.__struct_fields__
        if name not in ("num_clients", "stall")
    }
    return SchedulerStats(
        **sums,
        num_clients=max(part.num_clients for part in parts),
        stall=max(stalls, key=lambda stall: stall.free_s, default=None),
    )


def merge_metrics(parts: Sequence[EngineMetrics]) -> EngineMetrics:
    """Sums of all that is counted."""
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part.histograms)
    return EngineMetrics(
        stats=merge_stats([part.stats for part in parts]),
        histograms={
            name: _add_histograms([part.histograms[name] for part in parts if name in part.histograms])
            for name in names
        },
        finished_total=_add_counts(part.finished_total for part in parts),
        finished_by_kind_total=_add_counts(part.finished_by_kind_total for part in parts),
        tool_parse_errors_total=sum(part.tool_parse_errors_total for part in parts),
        reasoning_tokens_total=sum(part.reasoning_tokens_total for part in parts),
        cache_config=parts[0].cache_config,
    )


def merge_snapshots(by_engine: Mapping[int, EngineSnapshot]) -> EngineSnapshot:
    """All requests and blocks, one engine's after the other's; times of steps are means over all steps."""
    parts = list(by_engine.values())
    if len(parts) == 1:
        return parts[0]
    num_steps = sum(part.steps_per_s for part in parts)
    weights = [part.steps_per_s / num_steps if num_steps else 1 / len(parts) for part in parts]
    times = {
        name: sum(weight * getattr(part, name) for weight, part in zip(weights, parts, strict=True))
        for name in _STEP_TIMES
    }
    return EngineSnapshot(
        at=max(part.at for part in parts),
        epoch=",".join(part.epoch for part in parts),
        model=parts[0].model,
        max_num_seqs=sum(part.max_num_seqs for part in parts),
        uptime_s=max(part.uptime_s for part in parts),
        stats=merge_stats([part.stats for part in parts]),
        **{name: sum(getattr(part, name) for part in parts) for name in _RATES},
        **times,
        requests=[request for part in parts for request in part.requests],
        num_hidden_requests=sum(part.num_hidden_requests for part in parts),
        block_map=b"".join(part.block_map for part in parts),
        blocks_per_cell=max(part.blocks_per_cell for part in parts),
        clients=_merge_clients(client for part in parts for client in part.clients),
        engines=[_describe_load(index, part) for index, part in sorted(by_engine.items())],
    )


def _describe_load(index: int, snapshot: EngineSnapshot) -> EngineLoad:
    fields = msgspec.structs.asdict(snapshot) | msgspec.structs.asdict(snapshot.stats) | {"index": index}
    return EngineLoad(**{name: fields[name] for name in EngineLoad.__struct_fields__})


def _merge_clients(views: Iterable[ClientView]) -> list[ClientView]:
    merged: dict[str, ClientView] = {}
    for view in views:
        known = merged.get(view.name)
        if known is not None:
            sums = {name: getattr(known, name) + getattr(view, name) for name in _CLIENT_SUMS}
            view = msgspec.structs.replace(known, **sums)
        merged[view.name] = view
    return list(merged.values())


def _add_histograms(parts: Sequence[Histogram]) -> Histogram:
    counts = [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)]
    return Histogram(bounds=parts[0].bounds, counts=counts, sum=sum(part.sum for part in parts))


def _add_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total
