"""Several engines' answers as one: nothing is lost, and nothing counted twice."""

from __future__ import annotations

import msgspec
from frontend_fakes import make_stats
from quire.frontend.client.utility_calls import merge_metrics, merge_snapshots, merge_stats
from quire.ipc.protocol.engine_views import (
    ClientView,
    EngineMetrics,
    EngineSnapshot,
    Histogram,
    StalledRequest,
)


def make_client(name: str, num_running: int) -> ClientView:
    return ClientView(
        name=name,
        kind="LLM",
        pid=1,
        weight=1.0,
        num_running=num_running,
        num_waiting=1,
        tokens_served_total=10,
        num_unsent=0,
        connected_s=5.0,
    )


def make_snapshot(epoch: str, steps_per_s: float, schedule_ms: float, *clients: ClientView) -> EngineSnapshot:
    return EngineSnapshot(
        at=1.0,
        epoch=epoch,
        model="m",
        max_num_seqs=8,
        uptime_s=3.0,
        stats=make_stats(num_running=1),
        prompt_tokens_per_s=1.0,
        generation_tokens_per_s=2.0,
        steps_per_s=steps_per_s,
        schedule_ms=schedule_ms,
        update_ms=0.0,
        step_wait_ms=0.0,
        requests=[],
        num_hidden_requests=2,
        block_map=epoch.encode(),
        blocks_per_cell=1,
        clients=list(clients),
    )


def test_counts_are_added_and_a_client_of_all_counts_once() -> None:
    stalls = [StalledRequest(name, "waiting", free_s) for name, free_s in (("a", 1.0), ("b", 3.0))]
    parts = [
        make_stats(num_running=2, num_clients=3, kv_blocks_total=10, stall=stalls[0]),
        make_stats(num_running=3, num_clients=2, kv_blocks_total=20, stall=stalls[1]),
        make_stats(num_running=0, num_clients=3, kv_blocks_total=20),
    ]
    merged = merge_stats(parts)
    assert (merged.num_running, merged.num_clients, merged.kv_blocks_total) == (5, 3, 50)
    assert merged.stall is stalls[1]
    assert merge_stats(parts[:1]) is parts[0]


def test_histograms_are_added_bucket_by_bucket() -> None:
    parts = [
        EngineMetrics(
            stats=make_stats(generation_tokens_total=7),
            histograms={"ttft": Histogram(bounds=(1.0, 2.0), counts=[1, number, 0], sum=3.0)},
            finished_total={"stop": 1, f"own{number}": 1},
            reasoning_tokens_total=2,
        )
        for number in range(2)
    ]
    merged = merge_metrics(parts)
    assert merged.histograms["ttft"] == Histogram(bounds=(1.0, 2.0), counts=[2, 1, 0], sum=6.0)
    assert merged.finished_total == {"stop": 2, "own0": 1, "own1": 1}
    assert (merged.stats.generation_tokens_total, merged.reasoning_tokens_total) == (14, 4)


def test_a_snapshot_shows_all_requests_blocks_and_clients() -> None:
    one = make_snapshot("a", 3.0, 1.0, make_client("LLM-1", 2), make_client("LLM-2", 1))
    other = make_snapshot("b", 1.0, 5.0, make_client("LLM-1", 4))
    merged = merge_snapshots({3: other, 0: one})
    assert (merged.max_num_seqs, merged.steps_per_s, merged.schedule_ms) == (16, 4.0, 2.0)
    assert (merged.block_map, merged.num_hidden_requests, merged.epoch) == (b"ba", 4, "b,a")
    assert {client.name: client.num_running for client in merged.clients} == {"LLM-1": 6, "LLM-2": 1}
    assert [(engine.index, engine.prompt_tokens_per_s) for engine in merged.engines] == [
        (0, one.prompt_tokens_per_s),
        (3, other.prompt_tokens_per_s),
    ]
    assert merge_snapshots({0: one}) is one
    assert not one.engines
    idle = msgspec.structs.replace(one, steps_per_s=0.0)
    assert merge_snapshots({0: idle, 1: idle}).schedule_ms == 1.0
