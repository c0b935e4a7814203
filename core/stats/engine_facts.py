"""What an engine says about itself: its facts, how its start-up took its time, answers to utility calls.
Shared by the core's process and the in-process engine.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec

from ...ipc.protocol.messages import EngineFacts, UtilityCall, UtilityMethod, UtilityResult
from ...ipc.protocol.step import WorkerReady
from ...ipc.spec.config import EngineConfig
from ...ipc.spec.model_spec import ModelSpec
from ..engine.engine_core import EngineCore
from .stats_collector import CoreProcessInfo
from .step_recorder import StepRecorder


class StartupClock:
    """Consecutive start-up phases; their seconds add up to the time since the first began."""

    def __init__(self, phase: str, at: float) -> None:
        self._starts = [(phase, at)]

    @property
    def phase(self) -> str:
        """The phase that is running."""
        return self._starts[-1][0]

    @property
    def started_at(self) -> float:
        """When the first phase began, wall clock."""
        return self._starts[0][1]

    def begin(self, phase: str, at: float) -> None:
        """End the running phase and begin another."""
        self._starts.append((phase, at))

    def measure(self) -> list[tuple[str, float]]:
        """(phase, seconds) up to now."""
        starts = [*self._starts, ("", time.time())]
        return [(phase, after - at) for (phase, at), (_, after) in itertools.pairwise(starts)]


def make_engine_facts(
    config: EngineConfig, ready: WorkerReady, pids: dict[str, int], startup: StartupClock
) -> EngineFacts:
    """The facts that a client is welcomed with."""
    return EngineFacts(
        model=config.model.model,
        served_model_name=config.model.served_model_name,
        tokenizer=config.model.tokenizer,
        max_model_len=config.model.max_model_len,
        vocab_size=config.model.spec.vocab_size,
        dtype=config.model.dtype,
        weights=config.model.weights_name,
        kv_dtype="" if config.cache.kv_cache_dtype == "auto" else config.kv_dtype,
        weight_file=config.model.weight_files[0] if config.model.gguf_tensors else "",
        device=ready.device,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        num_gpu_blocks=ready.num_gpu_blocks if config.block_size_bytes else 0,
        block_size=config.cache.block_size,
        num_kv_tokens=config.count_kv_tokens(ready.num_gpu_blocks) if config.block_size_bytes else 0,
        num_state_slots=ready.num_state_slots,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_logprobs=config.model.max_logprobs,
        eos_token_ids=config.model.eos_token_ids,
        generation_config=config.model.generation_config,
        pids=pids,
        started_at=startup.started_at,
        startup=startup.measure(),
        ledger=ready.ledger,
        batch_variance_reason=ready.batch_variance_reason,
        attention_backend=ready.attention_backend,
        recovery=config.recovery,
        logits_processors=config.logits_processors,
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        tasks=config.model.spec.tasks,
        noted=config.model.noted and msgspec.structs.replace(config.model.noted, weights={}),
        chat_template=config.model.chat_template,
        served_model_aliases=config.model.served_model_aliases,
        has_token_types=config.model.spec.embedding.num_types > 1,
        **_make_vector_facts(config.model.spec),
    )


def _make_vector_facts(spec: ModelSpec) -> dict[str, Any]:
    pooling = spec.pooling
    if pooling is None:
        return {}
    if pooling.num_labels:
        return {"num_labels": pooling.num_labels}
    return {
        "embedding_size": pooling.count_width(spec.hidden_size),
        "is_matryoshka": pooling.is_matryoshka,
        "matryoshka_dimensions": pooling.matryoshka_dimensions,
    }


def format_phases(phases: list[tuple[str, float]]) -> str:
    """'ready in 1.20 s: import torch 1.00, load weights 0.20'."""
    seconds = sum(seconds for _, seconds in phases)
    return f"ready in {seconds:.2f} s: " + ", ".join(f"{phase} {took_s:.2f}" for phase, took_s in phases)


def _format_ranks(stage_size: int, num_stages: int) -> str:
    """' (2 stages of 2 ranks)', nothing for a worker alone."""
    ranks = f"{stage_size} rank{'s' * (stage_size > 1)}"
    if num_stages > 1:
        return f" ({num_stages} stages of {ranks})"
    return f" ({ranks})" if stage_size > 1 else ""


def format_startup(facts: EngineFacts) -> list[str]:
    """Lines for a person: what runs where, how the start took its time, and the device's memory ledger."""
    num_tokens = facts.num_kv_tokens
    place = facts.device + _format_ranks(facts.tensor_parallel_size, facts.pipeline_parallel_size)
    lines = [
        f"{facts.served_model_name} ({facts.formats}) on {place}, {format_phases(facts.startup)}",
        f"{facts.kv_dtype} KV cache of {facts.num_gpu_blocks:,} blocks: {num_tokens:,} tokens, ".lstrip()
        + f"{num_tokens / facts.max_model_len:.1f} requests of {facts.max_model_len:,}"
        if num_tokens
        else "no KV cache" + ("" if facts.num_state_slots else ": each prompt is computed in one step"),
    ]
    if slots := facts.num_state_slots:
        rows = facts.max_num_seqs
        lines.append(f"{slots:,} state slots: {rows:,} of running requests, {slots - rows:,} of prefixes")
    if facts.tasks != ("generate",):
        lines.append(f"tasks: {', '.join(facts.tasks)}")
    if "generate" in facts.tasks:
        lines.append(f"answers end at token {' or '.join(map(str, facts.eos_token_ids)) or 'none'}")
    lines.append(format_level(facts.batch_variance_reason))
    if facts.logits_processors:
        lines.append(f"logits processors: {', '.join(facts.logits_processors)}")
    lines += [f"  {name:<12} {size_bytes / 1e6:>12,.1f} MB" for name, size_bytes in facts.ledger]
    return lines


def format_level(batch_variance_reason: str) -> str:
    """'replays are exact', or the other level and why."""
    return f"replays are semantic: {batch_variance_reason}" if batch_variance_reason else "replays are exact"


def call_utility(core: EngineCore, call: UtilityCall, process: CoreProcessInfo) -> UtilityResult:
    """Answer a utility call."""
    match call.method:
        case UtilityMethod.PING:
            return UtilityResult(call.call_id)
        case UtilityMethod.STATS:
            return UtilityResult(call.call_id, stats=core.stats(len(process.clients)))
        case UtilityMethod.RESET_PREFIX_CACHE:
            done = core.reset_prefix_cache()
            return UtilityResult(call.call_id, error=None if done else "requests are using the cache")
        case UtilityMethod.CHECK_INTEGRITY:
            return UtilityResult(call.call_id, error="; ".join(core.check_integrity()) or None)
        case UtilityMethod.SNAPSHOT:
            return UtilityResult(call.call_id, snapshot=core.snapshot(process))
        case UtilityMethod.HISTORY:
            return UtilityResult(call.call_id, history=core.history())
        case UtilityMethod.METRICS:
            return UtilityResult(call.call_id, metrics=core.metrics(len(process.clients)))
        case UtilityMethod.DIGEST:
            return UtilityResult(call.call_id, digest=core.digests.make())
        case UtilityMethod.START_PROFILE:
            if core.recorder is not None:
                return UtilityResult(call.call_id, error="a profile of this engine is being taken already")
            core.recorder = StepRecorder()
            return UtilityResult(call.call_id)
        case UtilityMethod.STOP_PROFILE:
            recorder, core.recorder = core.recorder, None
            if recorder is None:
                return UtilityResult(call.call_id, error="nobody has started a profile of this engine")
            return UtilityResult(call.call_id, trace=recorder.make_trace())
