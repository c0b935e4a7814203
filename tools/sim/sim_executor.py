"""SimExecutor: a worker on the simulated timeline, behind the core's Executor interface.

It takes its time, has little memory and dies of poison, or takes the core with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from ...core.scheduling.step_times import MIN_CHUNK
from ...core.scheduling.work_turns import BURST_US, MAX_ROW_WORK_US
from ...core.workers.executor import Executor, ExecutorEvent, WorkerLost
from ...ipc.protocol.step import ModelRunnerOutput, SchedulerOutput, StepFailed, WorkerFailed, WorkerReady
from ...ipc.protocol.token_ids import count_token_ids
from ...ipc.spec.config import EngineConfig
from .fake_worker import FakeExecutor, FakeWorker, find_user_id
from .network import Timeline
from .scenario import FaultKind, Scenario, SimRequest

_WORKER_START_S = 0.1
_FAILED_STARTS: dict[str, ExecutorEvent] = {
    "killed": WorkerLost("the worker was killed"),
    "short": WorkerFailed("no memory just now", "OutOfMemoryError"),
    "missing": WorkerFailed("model='missing': a folder", "ModelError"),
}
_NUM_UNKNOWN = 4  # tokens of a row: two that are measured, and those in flight meanwhile
_NUM_UNTIMED = 5  # steps until what was seen of one is known where they are formed
_LONGEST_STEP_S = 0.01
_LONGEST_NOTICE_S = 0.02  # until the core knows that its worker is dead


class WorkerDied(Exception):
    """A step has ended its worker."""


class StepHung(Exception):
    """A step has taken too long, and its worker is killed."""


class CoreDied(Exception):
    """A step has ended the engine core."""


class PoisonedWorker(FakeWorker):
    """A FakeWorker for which some requests are poison, and some steps too large."""

    poisons: Mapping[str, SimRequest]
    capacity: int | None
    num_known: dict[str, int]  # tokens of requests since they have their rows: what the core has heard of
    num_before: dict[str, int]  # tokens of requests when they got their rows
    is_short: bool = False  # of memory for the next step, however small
    takes_long: bool = False  # each token of a prompt does
    pass_at: int | None = None  # the first step of decodes only
    prompt_at: int | None = None  # the first with prompts beside decodes after that

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | StepFailed:
        """As FakeWorker's; no step holds much of what is known to take long."""
        for new in step.new_requests:
            self.num_known[new.request_id] = 0
            self.num_before[new.request_id] = count_token_ids(new.output_token_ids)
        answer = super().execute(step)
        if isinstance(answer, ModelRunnerOutput) and self.work_us:
            names = [self.rows[row].request_id for row in answer.rows]
            known = [self.work_us.get(name, 0) for name in names if self.num_known[name] > _NUM_UNKNOWN]
            for name in names:
                self.num_known[name] += 1
            budget_us = BURST_US if 0 in known else 2 * BURST_US  # beside others, and without
            assert sum(known) <= budget_us + MAX_ROW_WORK_US, f"step {step.step_id} holds rows' work {known}"
        if isinstance(answer, ModelRunnerOutput) and self.takes_long:
            self._check_chunks(step)
        return answer

    def _check_chunks(self, step: SchedulerOutput) -> None:
        """Once it is known what passes and prompts take, no long prompt makes streams wait for much of it."""
        states = [self.rows[row] for row in step.rows]
        befores = [state.num_computed - count for state, count in zip(states, step.num_tokens, strict=True)]
        new = {one.row for one in step.new_requests}
        decodes = [
            count == 1 and before >= one.num_prompt_tokens and row not in new
            for row, one, before, count in zip(step.rows, states, befores, step.num_tokens, strict=True)
        ]
        if not any(decodes):
            return
        if self.pass_at is None:
            self.pass_at = step.step_id if all(decodes) else None
        elif self.prompt_at is None:
            num_tokens = sum(
                count for count, is_decode in zip(step.num_tokens, decodes, strict=True) if not is_decode
            )
            is_telling = step.step_id - self.pass_at > _NUM_UNTIMED and num_tokens >= MIN_CHUNK
            self.prompt_at = step.step_id if is_telling else None
        if self.prompt_at is None or step.step_id - self.prompt_at <= _NUM_UNTIMED:
            return
        threshold = self.config.scheduler.max_prompt_tokens_beside_decodes
        for state, before, count in zip(states, befores, step.num_tokens, strict=True):
            is_long = state.num_prompt_tokens - before > threshold
            assert not is_long or count <= MIN_CHUNK, (
                f"step {step.step_id}: streams wait for {count} tokens of {state.request_id}"
            )

    def find_failure(self, step: SchedulerOutput) -> StepFailed | None:
        num_tokens = sum(step.num_tokens)
        if self.is_short or (self.capacity is not None and num_tokens > self.capacity):
            self.is_short = False
            return _run_short(step, f"{num_tokens} tokens are too many")
        for number in step.rows:
            row = self.rows[number]
            request = self.poisons.get(find_user_id(row.request_id))
            num_output = len(row.tokens) - row.num_prompt_tokens
            if request is None:
                continue
            if request.poison == "hang":
                num_output -= self.num_before[row.request_id]
            if num_output < request.poison_from:
                continue
            match request.poison:
                case "hang":
                    raise StepHung(row.request_id)
                case "death":
                    raise WorkerDied(row.request_id)
                case "core":
                    raise CoreDied(row.request_id)
                case "step":
                    return StepFailed(step.step_id, f"poisoned by {row.request_id}")
                case "memory":
                    return _run_short(step, f"{row.request_id} is too large")
                case "grammar":
                    self.stuck.add(row.request_id)
                case _:
                    self.bad.add(row.request_id)
        return None


def _run_short(step: SchedulerOutput, cause: str) -> StepFailed:
    return StepFailed(step.step_id, cause, is_out_of_memory=True)


class SimExecutor(Executor):
    """One worker at a time; all that it does takes a random time."""

    def __init__(
        self,
        config: EngineConfig,
        scenario: Scenario,
        timeline: Timeline,
        rng: random.Random,
        on_event: Callable[[], None],
        on_core_poisoned: Callable[[], None],
        plan: str = "",
    ) -> None:
        """`on_event`: `receive` has something to return. `plan`: how the first start goes, "" is well."""
        self._plan = plan
        self._config = config
        self._scenario = scenario
        self._timeline = timeline
        self._rng = rng
        self._on_event = on_event
        self._on_core_poisoned = on_core_poisoned
        self._worker: PoisonedWorker | None = None
        self._steps: FakeExecutor | None = None  # of the worker; what is sent to a dead one is lost with it
        self._events: list[ExecutorEvent] = []
        self._is_stopped = False

    def start(self) -> None:
        self._call_within(_WORKER_START_S, self._get_ready)

    def submit(self, step: SchedulerOutput) -> None:
        if self._steps is not None:
            self._steps.submit(step)
            if len(self._steps.pending) == 1:
                self._run_step(self._steps)

    def reset_rows(self) -> None:
        if self._steps is not None:
            self._steps.reset_rows()

    def receive(self) -> list[ExecutorEvent]:
        events, self._events = self._events, []
        return events

    def stop(self, grace_s: float) -> None:
        del grace_s
        self._is_stopped = True
        self._steps = self._worker = None

    def harm_worker(self, kind: FaultKind) -> bool:
        """Let the worker die, or its next step raise or be too large; False if there is none."""
        if self._worker is None:
            return False
        match kind:
            case FaultKind.WORKER_CRASH:
                self._lose_worker("the worker was killed")
            case FaultKind.STEP_FAILURE:
                self._worker.fail_next = "injected"
            case _:
                self._worker.is_short = True
        return True

    def _call_within(self, longest_s: float, action: Callable[[], None]) -> None:
        self._timeline.call_at(self._timeline.now + self._rng.uniform(0.0, longest_s), action)

    def _tell(self, event: ExecutorEvent) -> None:
        self._events.append(event)
        self._on_event()

    def _get_ready(self) -> None:
        if self._is_stopped or self._plan == "hang":
            return
        if self._plan in _FAILED_STARTS:
            self._tell(_FAILED_STARTS[self._plan])
            return
        worker = self._worker = PoisonedWorker(self._config, self._scenario.num_blocks)
        worker.poisons, worker.capacity = self._scenario.poisons, self._scenario.capacity
        worker.work_us = {one.name: one.work_us for one in self._scenario.requests if one.work_us}
        worker.num_known, worker.num_before = {}, {}
        worker.takes_long = self._scenario.token_s > 0
        self._steps = FakeExecutor(worker)
        num_slots = self._config.cache.num_state_slots or 0
        self._tell(WorkerReady(self._scenario.num_blocks, "fake", [], num_state_slots=num_slots))

    def _lose_worker(self, reason: str, *, is_overdue: bool = False) -> None:
        self._steps = self._worker = None
        self._call_within(_LONGEST_NOTICE_S, lambda: self._tell(WorkerLost(reason, is_overdue)))

    def _run_step(self, steps: FakeExecutor) -> None:
        def finish() -> None:
            if self._steps is not steps:
                return
            try:
                self._tell(steps.collect())
            except WorkerDied as died:
                self._lose_worker(f"the worker died of {died}")
            except StepHung as hung:
                self._lose_worker(f"a step with {hung} took too long", is_overdue=True)
            except CoreDied:
                self._on_core_poisoned()
            else:
                if steps.pending:
                    self._run_step(steps)

        step = steps.pending[0]
        num_prompt_tokens = sum(step.num_tokens) - len(step.rows)
        lasts_s = self._rng.uniform(0.0, _LONGEST_STEP_S) + self._scenario.token_s * num_prompt_tokens
        self._timeline.call_at(self._timeline.now + lasts_s, finish)
