"""EngineCounters: what an engine core has done since it started. Plain sums, read by `EngineCore.stats`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """Only grow within an epoch."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    prompt_tokens: int = 0  # computed in prefill, after preemption again; cached ones not
    generation_tokens: int = 0
    schedule_s: float = 0.0
    update_s: float = 0.0
