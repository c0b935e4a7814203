"""Steps that are too large for the memory: they are made smaller, and only who fails alone fails."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeEngine, FakeExecutor, FakeWorker, make_request
from fakes import make_engine as make_any_engine
from quire.core.faults.failures import ATTEMPTS_AT_FLOOR, FIRST_PATIENCE, MAX_PATIENCE, StepLimits
from quire.ipc.protocol.messages import EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.protocol.step import ModelRunnerOutput, SchedulerOutput, StepFailed


class ShortWorker(FakeWorker):
    """A FakeWorker with memory for steps of `capacity` tokens, and for none with a request in `hungry`."""

    capacity = 1 << 30
    hungry: frozenset[str] = frozenset()
    num_shortages = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | StepFailed:
        if self.has_failed:
            return super().execute(step)
        arriving = {new.row: new.request_id for new in step.new_requests}
        names = {arriving.get(row) or self.rows[row].request_id for row in step.rows}
        if sum(step.num_tokens) <= self.capacity and not names & self.hungry:
            return super().execute(step)
        self.num_shortages += 1
        self.has_failed = True
        self.last_step_id = step.step_id
        return StepFailed(step.step_id, "too little memory", is_out_of_memory=True)


def make_engine(**scheduler: Any) -> tuple[FakeEngine, ShortWorker]:
    engine = make_any_engine(64 * 9, **{"max_num_seqs": 64, "max_num_batched_tokens": 256} | scheduler)
    worker = ShortWorker(engine.config, 64 * 9)
    engine.worker, engine.executor = worker, FakeExecutor(worker)
    return engine, worker


def make_requests(count: int, prompt_length: int = 30) -> list[EngineCoreRequest]:
    return [make_request(f"r{i}", [i, *range(prompt_length)], max_tokens=40) for i in range(count)]


@pytest.mark.parametrize(
    ("capacity", "run_ahead", "policy"),
    [(1, 1, "fair"), (2, 2, "fcfs"), (40, 1, "fcfs"), (40, 2, "fair"), (100, 2, "fcfs")],
)
def test_a_batch_that_does_not_fit_is_made_smaller_and_nobody_fails(
    capacity: int, run_ahead: int, policy: str
) -> None:
    engine, worker = make_engine(policy=policy, run_ahead=run_ahead)
    worker.capacity = capacity
    requests = make_requests(24)
    engine.add_all(requests)
    engine.run()
    assert worker.num_shortages > 0
    engine.check_undisturbed(requests)


def test_steps_grow_again_when_there_is_memory_again() -> None:
    engine, worker = make_engine()
    worker.capacity = 8
    requests = make_requests(24)
    engine.add_all(requests)
    while worker.num_shortages < 5:
        engine.turn()
    assert engine.core.failures.step_limits[0] <= 8
    worker.capacity = 1 << 30
    requests += [make_request(f"late{i}", [i, i, 3], max_tokens=100) for i in range(300)]
    engine.add_all(requests[24:])
    engine.run()
    assert engine.core.failures.step_limits == (256, 64)
    assert worker.num_shortages == 5
    engine.check_undisturbed(requests)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("splits", [True, False])
def test_only_the_requests_that_never_fit_fail_with_their_own_code(splits: bool, policy: str) -> None:
    engine, worker = make_engine(policy=policy, enable_chunked_prefill=splits)
    worker.hungry = frozenset({"r3", "r17"})
    requests = make_requests(24)
    engine.add_all(requests)
    engine.run()
    for name in worker.hungry:
        final = engine.finals[name]
        assert (final.finish_reason, final.error_code) == (FinishReason.ERROR, ErrorCode.OUT_OF_MEMORY)
        assert final.error == "too little memory"
    engine.check_undisturbed([one for one in requests if one.request_id not in worker.hungry])


def test_a_shortage_during_a_search_for_a_poison_request_convicts_nobody_else() -> None:
    engine, worker = make_engine()
    worker.poisoned.add("r5")
    requests = make_requests(16)
    engine.add_all(requests)
    engine.turn()
    worker.capacity = 6
    engine.run()
    assert engine.finals["r5"].error_code is ErrorCode.POISON_REQUEST
    engine.check_undisturbed([one for one in requests if one.request_id != "r5"])


def test_limits_are_halved_and_doubled_more_and_more_slowly() -> None:
    limits = StepLimits(256, 64, can_split=True)
    assert limits.shrink(200, 50)
    assert (limits.max_tokens, limits.max_rows) == (100, 25)
    waits: list[int] = []
    for _ in range(10):
        num_steps = 1
        while not limits.note_success():
            num_steps += 1
        waits.append(num_steps)
        assert (limits.max_tokens, limits.max_rows) == (200, 50)
        assert limits.shrink(200, 50)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (FIRST_PATIENCE, MAX_PATIENCE)


def test_a_single_prompt_is_halved_without_limiting_how_many_requests_run() -> None:
    limits = StepLimits(256, 64, can_split=True)
    assert limits.shrink(256, 1)
    assert (limits.max_tokens, limits.max_rows) == (128, 64)


def test_the_smallest_step_is_tried_again_before_its_request_fails() -> None:
    limits = StepLimits(256, 64, can_split=True)
    answers = [limits.shrink(1, 1) for _ in range(ATTEMPTS_AT_FLOOR)]
    assert answers == [True] * (ATTEMPTS_AT_FLOOR - 1) + [False]


def test_more_rows_than_tokens_may_be_configured_and_come_back() -> None:
    limits = StepLimits(16, 64, can_split=True)
    assert limits.shrink(16, 16)
    while not limits.note_success():
        pass
    assert (limits.max_tokens, limits.max_rows) == (16, 16)
