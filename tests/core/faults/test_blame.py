"""The search for the request that makes steps fail or workers die: it alone ends with an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from fakes import FakeEngine, count_calls_of, expected_output, make_config, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.ipc.protocol.messages import EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.protocol.step import StepFailed
from quire.ipc.spec.config import SchedulerConfig

MAX_MODEL_LEN = 128


def make_engine(**changes: Any) -> FakeEngine:
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256, **changes)
    return FakeEngine(make_config(max_model_len=MAX_MODEL_LEN, scheduler=scheduler), 64 * 9)


def make_requests(count: int, *, max_tokens: int = 12) -> list[EngineCoreRequest]:
    return [make_request(f"r{i}", [1 + i, 2, 3], max_tokens=max_tokens) for i in range(count)]


def assert_undisturbed(engine: FakeEngine, requests: list[EngineCoreRequest]) -> None:
    for request in requests:
        tokens, reason = expected_output(request, MAX_MODEL_LEN)
        assert engine.tokens[request.request_id] == tokens
        assert engine.finals[request.request_id].finish_reason == reason


def assert_convicted(engine: FakeEngine, request_id: str) -> None:
    final = engine.finals[request_id]
    assert final.finish_reason is FinishReason.ERROR
    assert final.error_code is ErrorCode.POISON_REQUEST


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("poisoned", [[31], [0, 63], [5, 6, 7]])
def test_exactly_the_poison_requests_among_64_fail(poisoned: list[int], run_ahead: int, policy: str) -> None:
    engine = make_engine(run_ahead=run_ahead, policy=policy)
    requests = make_requests(64)
    engine.worker.poisoned.update(f"r{i}" for i in poisoned)
    for request in requests:
        engine.add(request)
    engine.run()
    for i in poisoned:
        assert_convicted(engine, f"r{i}")
    assert_undisturbed(engine, [request for i, request in enumerate(requests) if i not in poisoned])
    assert engine.core.check_integrity() == []


def test_a_step_that_fails_once_fails_nobody() -> None:
    engine = make_engine()
    requests = make_requests(20)
    for request in requests:
        engine.add(request)
    engine.turn()
    engine.worker.fail_next = "a hiccup"
    engine.run()
    assert_undisturbed(engine, requests)


def test_requests_that_come_or_go_during_the_search_are_served_and_ended() -> None:
    engine = make_engine()
    requests = make_requests(32)
    engine.worker.poisoned.add("r20")
    for request in requests:
        engine.add(request)
    engine.turn()  # the step fails, the search begins
    late = make_requests(40)[36:]
    for request in late:
        engine.add(request)
    engine.core.abort_requests(b"client", ["r0", "r1", "r30", "r37"])  # under test, parked, just arrived
    engine.deliver()
    assert engine.core.check_integrity() == []
    engine.run()
    for gone in ("r0", "r1", "r30", "r37"):
        assert engine.finals[gone].finish_reason is FinishReason.ABORT
    assert_convicted(engine, "r20")
    others = [one for one in requests + late if one.request_id not in ("r0", "r1", "r20", "r30", "r37")]
    assert_undisturbed(engine, others)


def test_a_whole_group_that_is_aborted_makes_way_for_the_next() -> None:
    engine = make_engine()
    requests = make_requests(4)
    engine.worker.poisoned.add("r3")
    for request in requests:
        engine.add(request)
    engine.turn()
    engine.core.abort_requests(b"client", ["r0", "r1"])  # the first half
    engine.deliver()
    engine.run()
    assert_convicted(engine, "r3")
    assert_undisturbed(engine, [requests[2]])


def test_a_worker_that_is_killed_now_and_then_convicts_nobody() -> None:
    engine = make_engine()
    requests = make_requests(8, max_tokens=40)
    for request in requests:
        engine.add(request)
    for _ in range(12):
        engine.turn()
        engine.turn()
        engine.launch()
        engine.lose_worker()
        assert engine.core.check_integrity() == []
    engine.run()
    assert_undisturbed(engine, requests)


@pytest.mark.parametrize("num_others", [0, 1, 15])
def test_a_request_that_kills_workers_fails_alone(num_others: int) -> None:
    engine = make_engine()
    others = make_requests(num_others)
    for request in [
        *others[: num_others // 2],
        make_request("lethal", [9, 9], max_tokens=5),
        *others[num_others // 2 :],
    ]:
        engine.add(request)
    num_deaths = 0
    while "lethal" not in engine.finals:
        while engine.launch() is not None:
            pass
        rows = engine.executor.pending[0].rows if engine.executor.pending else []
        live = {request.row for request in engine.core._requests.values() if request.request_id == "lethal"}
        if live & set(rows):
            num_deaths += 1
            assert num_deaths < 20
            engine.lose_worker()
            engine.deliver()
        else:
            engine.turn()
    assert_convicted(engine, "lethal")
    engine.run()
    assert_undisturbed(engine, others)
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_those_who_wait_cost_a_search_nothing(policy: str) -> None:
    costs: list[int] = []
    for num_waiting in (1, 3000):
        engine = make_engine(policy=policy, run_ahead=1)
        for request in make_requests(64 + num_waiting):
            engine.add(request)
        engine.turn()
        cost = 0
        for _ in range(2):  # the search begins, and its first group is halved
            engine.worker.fail_next = "a hiccup"
            engine.launch()
            answer = engine.executor.collect()
            assert isinstance(answer, StepFailed)
            cost += count_calls_of(partial(engine.core.failures.fail_step, answer))[0]
        costs.append(cost)
    assert costs[1] < costs[0] + 200  # to move each of them would be thousands


@settings(max_examples=40, deadline=None)
@given(
    num_requests=st.integers(1, 24),
    poisoned=st.sets(st.integers(0, 23), max_size=4),
    turns=st.lists(st.sampled_from(["turn", "kill", "abort", "add"]), max_size=12),
)
def test_whatever_happens_during_a_search_every_request_ends_once(
    num_requests: int, poisoned: set[int], turns: list[str]
) -> None:
    engine = make_engine()
    engine.worker.poisoned.update(f"r{i}" for i in poisoned)
    requests = make_requests(num_requests)
    for request in requests:
        engine.add(request)
    for place, turn in enumerate(turns):
        if turn == "turn":
            engine.turn()
        elif turn == "kill":
            engine.launch()
            engine.lose_worker()
        elif turn == "abort":
            engine.core.abort_requests(b"client", [f"r{place}"])
        else:
            requests.append(make_request(f"late{place}", [place + 1, 7], max_tokens=4))
            engine.add(requests[-1])
        engine.deliver()
        assert engine.core.check_integrity() == []
    engine.run()
    for request in requests:
        final = engine.finals[request.request_id]
        if final.finish_reason is FinishReason.ERROR:
            assert request.request_id in engine.worker.poisoned or "kill" in turns
        elif final.finish_reason is not FinishReason.ABORT:
            assert_undisturbed(engine, [request])


LIMIT_S, TEST_LIMIT_S, RESTART_S = 8.0, 3.0, 2.0
MAX_SILENCE_S = LIMIT_S + TEST_LIMIT_S + 2 * RESTART_S + 1.0  # a second for sound tests


class HangingEngine:
    """An engine whose steps take 10 ms; with `culprit` too long, and its worker is killed and replaced."""

    def __init__(self, culprit: str) -> None:
        self.engine, self.culprit = make_engine(), culprit
        self.num_hangs = 0
        self.silences: dict[str, float] = {}  # the longest of each request
        self._heard: dict[str, tuple[int, float]] = {}

    def run(self, requests: list[EngineCoreRequest]) -> None:
        engine = self.engine
        for request in requests:
            engine.add(request)
            self._heard[request.request_id] = 0, engine.clock()
        for _ in range(2000):
            while engine.launch() is not None:
                pass
            if not engine.executor.pending:
                if not engine.core.num_unfinished:
                    return
                next_at = engine.core.next_schedule_at()
                assert next_at is not None
                engine.clock.advance(max(0.0, next_at - engine.clock()))
            elif self._has_culprit(engine.executor.pending[0].rows):
                self.num_hangs += 1
                limit_s = TEST_LIMIT_S if engine.core.blame.is_searching else LIMIT_S
                engine.clock.advance(limit_s + RESTART_S)
                engine.lose_worker(is_overdue=True)
            else:
                engine.finish_step()
                engine.clock.advance(0.01 - 1.0)  # of which finish_step took a second
            self._listen()
        raise AssertionError("it does not end")

    def _has_culprit(self, rows: list[int]) -> bool:
        live = self.engine.core._requests.get(self.culprit)
        return live is not None and live.row in rows

    def _listen(self) -> None:
        now = self.engine.clock()
        for name, (count, at) in self._heard.items():
            if len(self.engine.tokens[name]) > count or name in self.engine.finals:
                self.silences[name] = max(self.silences.get(name, 0.0), now - at)
                self._heard[name] = len(self.engine.tokens[name]), now


@pytest.mark.parametrize("num_others", [1, 15, 63])
def test_of_a_step_that_takes_too_long_the_culprit_costs_two_short_tests(num_others: int) -> None:
    hanging = HangingEngine("slow")
    others = make_requests(num_others, max_tokens=100)
    hanging.run([*others[:3], make_request("slow", [9, 9], max_tokens=5, grammar="start: /a/"), *others[3:]])
    assert_convicted(hanging.engine, "slow")
    assert_undisturbed(hanging.engine, others)
    assert hanging.num_hangs == 3
    assert max(hanging.silences[request.request_id] for request in others) < MAX_SILENCE_S


@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_culprit_like_all_others_costs_nobody_a_longer_silence(place: int) -> None:
    hanging = HangingEngine(f"r{place}")
    requests = make_requests(16, max_tokens=100)
    hanging.run(requests)
    assert_convicted(hanging.engine, f"r{place}")
    others = [request for request in requests if request.request_id != f"r{place}"]
    assert_undisturbed(hanging.engine, others)
    assert hanging.num_hangs == 3
    assert max(hanging.silences[request.request_id] for request in others) < MAX_SILENCE_S


def test_who_is_not_suspected_runs_as_long_as_it_was_held_up_before_the_next_test() -> None:
    engine = make_engine()
    suspects, late = make_requests(2), make_request("late", [5, 5], max_tokens=60)
    for request in suspects:
        engine.add(request)
    engine.launch()
    engine.lose_worker(is_overdue=True)
    engine.launch()  # a test
    engine.add(late)
    engine.clock.advance(5.0)
    engine.lose_worker(is_overdue=True)
    began = engine.clock()
    while not engine.core.blame.is_testing:
        assert engine.turn()
    assert engine.clock() - began == pytest.approx(5.0, abs=2.0)  # a turn takes a second
    assert 3 <= len(engine.tokens["late"]) < 10
    engine.run()
    assert_undisturbed(engine, [*suspects, late])
