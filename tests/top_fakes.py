"""An engine that `quire top` looks at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgspec
from quire.ipc.protocol.engine_views import (
    ClientView,
    EngineMetrics,
    EngineSnapshot,
    Histogram,
    RequestView,
    SchedulerStats,
)
from quire.ipc.protocol.messages import EngineFacts


def make_request(name: str, **changes: Any) -> RequestView:
    values = {
        "request_id": name,
        "client": "llm-7",
        "state": "running",
        "waits_for": "",
        "num_prompt_tokens": 20,
        "num_computed_tokens": 25,
        "num_output_tokens": 5,
        "max_total_tokens": 40,
        "num_blocks": 2,
        "num_preemptions": 0,
        "age_s": 65.0,
    }
    return RequestView(**{**values, **changes})


def make_client(name: str) -> ClientView:
    return ClientView(
        name=name,
        kind="llm",
        pid=7,
        weight=1.0,
        num_running=1,
        num_waiting=0,
        tokens_served_total=12345,
        num_unsent=0,
        connected_s=4000.0,
    )


def make_snapshot(requests: list[RequestView] | None = None, **changes: Any) -> EngineSnapshot:
    stats = SchedulerStats(
        num_running=1,
        num_waiting=1234,
        num_clients=1,
        kv_blocks_used=30,
        kv_blocks_total=120,
        prefix_cache_queries_total=100,
        prefix_cache_hits_total=25,
        num_preemptions_total=3,
        num_steps_total=10,
        prompt_tokens_total=100,
        generation_tokens_total=200,
        schedule_s_total=0.1,
        update_s_total=0.1,
        step_wait_s_total=0.1,
    )
    values = {
        "at": 1000.0,
        "epoch": "e",
        "model": "pocket",
        "max_num_seqs": 256,
        "uptime_s": 7500.0,
        "stats": stats,
        "prompt_tokens_per_s": 310.0,
        "generation_tokens_per_s": 1501.0,
        "steps_per_s": 20.0,
        "schedule_ms": 0.1,
        "update_ms": 0.2,
        "step_wait_ms": 5.0,
        "requests": [make_request("one")] if requests is None else requests,
        "num_hidden_requests": 0,
        "block_map": bytes((255, 255)) * 30 + bytes((0, 255)) * 30 + bytes((0, 0)) * 60,
        "blocks_per_cell": 1,
        "clients": [make_client("llm-7")],
    }
    return EngineSnapshot(**{**values, **changes})


def make_facts(**changes: Any) -> EngineFacts:
    values = {
        "model": "pocket",
        "served_model_name": "pocket",
        "tokenizer": "",
        "max_model_len": 64,
        "vocab_size": 100,
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks": 120,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 64,
        "max_logprobs": 20,
        "eos_token_ids": (),
        "generation_config": "",
        "pids": {"core": os.getpid()},
        "started_at": 0.0,
        "startup": [],
        "ledger": [("weights", 2_000_000), ("KV cache", 500_000_000)],
    }
    values |= changes
    num_tokens = values["num_gpu_blocks"] * values["block_size"]
    return EngineFacts(**({"num_kv_tokens": num_tokens} | values))


@dataclass
class FakeEngine:
    """What `top` asks of an LLMEngine."""

    taken: EngineSnapshot
    num_closed: int = 0

    def __post_init__(self) -> None:
        self.facts = make_facts()
        self.facts_by_engine = {0: self.facts}
        self.aborted: list[str] = []

    def snapshot(self) -> EngineSnapshot:
        return self.taken

    def metrics(self) -> EngineMetrics:
        histogram = Histogram(bounds=(0.1, 0.2), counts=[9, 1, 0], sum=1.0)
        return EngineMetrics(
            stats=self.taken.stats,
            histograms={"time_to_first_token_seconds": histogram},
            finished_total={},
        )

    def abort_named(self, names: list[str]) -> None:
        self.aborted += names
        left = [one for one in self.taken.requests if one.request_id not in names]
        self.taken = msgspec.structs.replace(self.taken, requests=left)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.num_closed += 1
