"""What several engines say of themselves, as if they were one: sums, and the worst where one counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ...ipc.engine_views import (
    ClientView,
    EngineLoad,
    EngineMetrics,
    EngineSnapshot,
    Histogram,
    SchedulerStats,
)

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
    stats = snapshot.stats
    return EngineLoad(
        index=index,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        kv_blocks_used=stats.kv_blocks_used,
        kv_blocks_total=stats.kv_blocks_total,
        prompt_tokens_per_s=snapshot.prompt_tokens_per_s,
        generation_tokens_per_s=snapshot.generation_tokens_per_s,
    )


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
