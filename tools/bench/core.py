"""`quire bench core`: what the engine core's Python costs a step, with a worker that answers at once.

No sockets and no device: schedule() and update() are timed around a fake that samples random tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from ...core.engine.engine_core import EngineCore
from ...frontend.options.engine_args import EngineArgs
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.messages import EngineCoreRequest
from ...ipc.protocol.step import ModelRunnerOutput, SchedulerOutput
from ...ipc.protocol.token_ids import encode_token_ids
from ...ipc.spec.config import SchedulingPolicy
from ..options import COUNT, option
from .machine import print_machine
from .table import format_table

NUM_RUNNING = 256
NUM_QUEUED = 10_000
_PROMPT_LEN = 32  # tokens
_BLOCK_SIZE = 16  # tokens
_VOCAB_SIZE = 2048  # of the pocket model, whose config it is
_CLIENT = b"bench"


def _execute(step: SchedulerOutput, rng: random.Random) -> ModelRunnerOutput:
    """The result that a worker would send for `step`: a random token for each row that is due."""
    rows = step.rows if step.sampled_rows is None else step.sampled_rows
    return ModelRunnerOutput(step.step_id, rows, [rng.randrange(_VOCAB_SIZE) for _ in rows])


@dataclass(frozen=True, slots=True)
class Options:
    """schedule() and update() of 256 running requests, with a fake worker."""

    steps: int = option(500, "decode steps to measure (500)", COUNT, metavar="N")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Median and 99th percentile of one step's parts, in milliseconds."""

    schedule_ms: float
    update_ms: float
    total_ms: float
    p99_ms: float


def run(options: Options) -> int:
    """Measure and print; returns 0."""
    print_machine()
    num_steps = options.steps
    rows: list[list[str]] = []
    for label, cost in {
        f"{NUM_RUNNING} running": measure_step_cost(num_steps, 0),
        f"and {NUM_QUEUED:,} queued": measure_step_cost(num_steps, NUM_QUEUED),
        "fair, one client": measure_step_cost(num_steps, 0, policy="fair"),
        "fair, newcomers of another": measure_step_cost(num_steps, 0, policy="fair", newcomer_every=10),
    }.items():
        figures = (cost.schedule_ms, cost.update_ms, cost.total_ms, cost.p99_ms)
        rows.append([label, *(f"{figure:.3f}" for figure in figures)])
    print(format_table(["a step, ms", "schedule", "update + outputs", "both", "both, p99"], rows))
    print(f"medians of {num_steps} decode steps; fake worker, no sockets, no stop strings")
    return 0


def measure_step_cost(
    num_steps: int,
    num_queued: int,
    num_running: int = NUM_RUNNING,
    policy: SchedulingPolicy = "fcfs",
    newcomer_every: int | None = None,
) -> StepCost:
    """Time `num_steps` decode steps of `num_running` requests with `num_queued` more waiting.

    newcomer_every: before each so manieth step a short request of another client comes.
    """
    core, rng = _make_core(num_steps, num_running, policy), random.Random(0)
    for index in range(num_running + num_queued):
        core.add_request(_CLIENT, _make_request(index, num_steps + 32))
    _run_until_all_decode(core, rng, num_running)
    schedule_s: list[float] = []
    update_s: list[float] = []
    while len(schedule_s) < num_steps:
        if newcomer_every is not None and len(schedule_s) % newcomer_every == 0:
            core.add_request(b"newcomer", _make_request(num_running + num_queued + len(schedule_s), 1))
        start = time.perf_counter()
        step = core.schedule()
        schedule_s.append(time.perf_counter() - start)
        assert step is not None, "the bench's requests outlive its steps"
        assert newcomer_every is not None or len(step.rows) == num_running
        result = _execute(step, rng)
        start = time.perf_counter()
        core.update(result)
        core.take_outputs()
        update_s.append(time.perf_counter() - start)
    both = sorted(a + b for a, b in zip(schedule_s, update_s, strict=True))
    return StepCost(
        schedule_ms=statistics.median(schedule_s) * 1e3,
        update_ms=statistics.median(update_s) * 1e3,
        total_ms=statistics.median(both) * 1e3,
        p99_ms=both[int(0.99 * (len(both) - 1))] * 1e3,
    )


def _run_until_all_decode(core: EngineCore, rng: random.Random, num_running: int) -> None:
    num_decoding = 0
    while num_decoding < num_running:
        step = core.schedule()
        assert step is not None, "there is always something to run"
        core.update(_execute(step, rng))
        core.take_outputs()
        num_decoding = sum(count == 1 for count in step.num_tokens)


def _make_core(num_steps: int, num_running: int, policy: SchedulingPolicy) -> EngineCore:
    config = EngineArgs(
        load_format="dummy",
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=2048,
        scheduling_policy=policy,
    ).create_engine_config()
    blocks_per_request = -(-(_PROMPT_LEN + num_steps + 64) // _BLOCK_SIZE)
    return EngineCore(config, num_blocks=blocks_per_request * num_running, hash_seed=b"bench")


def _make_request(index: int, max_tokens: int) -> EngineCoreRequest:
    rng = random.Random(index)
    return EngineCoreRequest(
        request_id=f"bench-{index}",
        prompt_token_ids=encode_token_ids(rng.randrange(_VOCAB_SIZE) for _ in range(_PROMPT_LEN)),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=index),
        arrival_time=float(index),
    )
