"""What drives the pure core in tests, around the simulator's FakeWorker: FakeEngine, and a step's cost."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

from quire.core.engine.engine_core import EngineCore
from quire.core.scheduling.request import QueueOrder, Request
from quire.core.scheduling.scheduler import Scheduler
from quire.core.scheduling.step import Step
from quire.core.scheduling.tenant import Tenant
from quire.ipc.protocol.messages import EngineCoreOutput, EngineCoreRequest
from quire.ipc.protocol.step import ModelRunnerOutput, SchedulerOutput, StepFailed
from quire.ipc.protocol.token_ids import decode_token_ids
from quire.ipc.spec.config import EngineConfig, SchedulerConfig
from quire.tools.sim.fake_worker import (
    VOCAB_SIZE,
    FakeClock,
    FakeExecutor,
    FakeWorker,
    expected_output,
    make_config,
    make_logprobs,
    make_request,
    token_at,
)

T = TypeVar("T")

__all__ = [
    "VOCAB_SIZE",
    "FakeClock",
    "FakeEngine",
    "FakeExecutor",
    "FakeWorker",
    "count_calls",
    "count_calls_of",
    "expected_output",
    "make_config",
    "make_engine",
    "make_live",
    "make_logprobs",
    "make_request",
    "measure_step_overhead",
    "token_at",
]


class FakeEngine:
    """The busy loop without its sockets: a core, a fake worker, and what each request has received."""

    def __init__(self, config: EngineConfig, num_blocks: int, *, verify: bool = True) -> None:
        self.config = config
        self.clock = FakeClock()
        num_slots = config.cache.num_state_slots or 0
        clock, seed = self.clock, b"fixed for tests"
        self.core = EngineCore(config, num_blocks, clock, seed, clock, num_state_slots=num_slots)
        self.worker = FakeWorker(config, num_blocks, verify)
        self.executor = FakeExecutor(self.worker)
        self.steps: list[SchedulerOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.finals: dict[str, EngineCoreOutput] = {}
        self.outputs: list[EngineCoreOutput] = []

    @property
    def scheduler(self) -> Scheduler:
        """Who decides what the core computes."""
        return self.core._scheduler  # pyright: ignore[reportPrivateUsage]

    @property
    def requests(self) -> dict[str, Request]:
        """The live ones by id, as the core has them."""
        return self.core._requests  # pyright: ignore[reportPrivateUsage]

    @property
    def newest_step(self) -> Step:
        """The step that was formed last, while it is in flight."""
        return self.scheduler.in_flight[-1]

    def list_running(self, client: bytes | None = None) -> list[str]:
        """Ids of the running requests, of one client or of all."""
        running = self.scheduler.running
        return [request.request_id for request in running if client in (None, request.client)]

    def launch_work(self) -> dict[str, int]:
        """`launch`; the step's tokens by request."""
        step = self.launch()
        if step is None:
            return {}
        requests = self.newest_step.requests
        return {request.request_id: count for request, count in zip(requests, step.num_tokens, strict=True)}

    def compute(self) -> dict[str, int]:
        """One step, launched and finished; its tokens by request."""
        work = self.launch_work()
        self.finish_step()
        return work

    def check_undisturbed(self, requests: list[EngineCoreRequest]) -> None:
        """Fails unless each of these has ended as it would have alone."""
        for request in requests:
            tokens, reason = expected_output(request, self.config.model.max_model_len)
            assert self.tokens[request.request_id] == tokens
            assert self.finals[request.request_id].finish_reason == reason
        assert self.core.check_integrity() == []

    def add(self, request: EngineCoreRequest, client: bytes = b"client") -> None:
        """Add a request and take what comes back at once."""
        self.tokens.setdefault(request.request_id, decode_token_ids(request.output_token_ids))
        self.core.add_request(client, request)
        self.deliver()

    def add_all(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Add these in their order."""
        for request in requests:
            self.add(request)

    def launch(self) -> SchedulerOutput | None:
        """Schedule one step and send it."""
        if self.core.blame.take_reset():
            self.executor.reset_rows()
        step = self.core.schedule()
        if step is not None:
            self.steps.append(step)
            self.executor.submit(step)
        return step

    def finish_step(self) -> None:
        """Take the answer to the oldest step and deliver what follows from it."""
        answer = self.executor.collect()
        if isinstance(answer, StepFailed):
            self.core.failures.fail_step(answer)
        else:
            self.core.update(answer)
        self.clock.advance(1.0)
        self.deliver()

    def lose_worker(self, *, is_overdue: bool = False) -> None:
        """The worker dies, or is killed since its step takes too long; another is there."""
        self.executor.pending.clear()
        self.worker.lose()
        self.core.failures.lose_worker("the worker was lost", is_overdue=is_overdue)
        self.deliver()

    def turn(self) -> bool:
        """Fill the pipeline, then take one answer; False if nothing could be done."""
        while self.launch() is not None:
            pass
        if not self.executor.pending:
            return False
        self.finish_step()
        return True

    def run(self, max_turns: int = 100_000) -> None:
        """Run until every request has ended."""
        for _ in range(max_turns):
            if not self.turn():
                break
        assert not self.core.num_unfinished, "the engine stands still with requests left"

    def deliver(self) -> None:
        """Merge outputs by position, as a frontend does, and check that nothing is lost or doubled."""
        for outputs in self.core.take_outputs().values():
            for output in outputs:
                self.outputs.append(output)
                tokens = self.tokens[output.request_id]
                assert output.request_id not in self.finals, "an output after the final one"
                assert output.start == len(tokens), f"{output.request_id}: {output.start} after {len(tokens)}"
                tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finals[output.request_id] = output


def make_engine(num_blocks: int = 64, *, verify: bool = True, **options: Any) -> FakeEngine:
    """An engine; `options` are fields of SchedulerConfig, and arguments of `make_config`."""
    names = [name for name in SchedulerConfig.__struct_fields__ if name in options]
    scheduler = SchedulerConfig(**{name: options.pop(name) for name in names})
    return FakeEngine(make_config(scheduler=scheduler, **options), num_blocks, verify=verify)


def make_live(prompt: list[int], order: QueueOrder = (0, 0.0, 0), **fields: Any) -> Request:
    """A request as the core has it, of no engine."""
    message = make_request(f"r{order[2]}", prompt, **fields)
    return Request.from_message(message, b"client", Tenant(b"client", 1.0), order, 4096, 0.0)


def measure_step_overhead(
    num_running: int = 256, num_waiting: int = 0, num_steps: int = 300, run_ahead: int = 2
) -> dict[str, float]:
    """Microseconds of `schedule` and `update` a decode step, with `num_waiting` requests queued behind.

    Keys: schedule_us, update_us and total_us are medians; worst_us is the worst sum of both in one step.
    """
    engine = make_engine(
        num_running * 64,
        verify=False,
        max_model_len=4096,
        block_size=16,
        max_num_seqs=num_running,
        max_num_batched_tokens=8192,
        run_ahead=run_ahead,
    )
    for i in range(num_running + num_waiting):
        # Prompts of different lengths, so that not all rows fill a block in the same step.
        prompt = [i % VOCAB_SIZE, i // VOCAB_SIZE] * 16 + [0] * (i % 16)
        engine.add(make_request(f"r{i}", prompt, arrival_time=float(i), max_tokens=None))
    while len(engine.scheduler.running) < num_running:
        engine.turn()
    schedule_us: list[float] = []
    update_us: list[float] = []
    for _ in range(num_steps):
        while True:
            began = time.perf_counter()
            step = engine.launch()
            if step is None:
                break
            schedule_us.append((time.perf_counter() - began) * 1e6)
        answer = engine.executor.collect()
        assert isinstance(answer, ModelRunnerOutput)
        began = time.perf_counter()
        engine.core.update(answer)
        update_us.append((time.perf_counter() - began) * 1e6)
        engine.core.take_outputs()
    totals = [a + b for a, b in zip(schedule_us, update_us, strict=False)]
    return {
        "schedule_us": statistics.median(schedule_us),
        "update_us": statistics.median(update_us),
        "total_us": statistics.median(totals),
        "worst_us": max(totals),
    }


def count_calls(engine: FakeEngine) -> int:
    """Python and C calls of one schedule and update of a step."""
    num_calls, step = count_calls_of(engine.core.schedule)
    assert step is not None
    answer = engine.worker.execute(step)
    num_calls += count_calls_of(lambda: engine.core.update(answer))[0]  # pyright: ignore[reportArgumentType]
    engine.deliver()
    return num_calls


def count_calls_of(function: Callable[[], T]) -> tuple[int, T]:
    """Python and C calls that it makes, and what it returns."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return num_calls, result
