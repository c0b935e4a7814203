"""The search for the request that makes steps fail or workers die: it alone ends with an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from fakes import FakeEngine, count_calls_of, make_request
from fakes import make_engine as make_any_engine
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.core.faults.blame import MAX_DEATHS, WorkerDeath
from quire.ipc.processes.restarts import MAX_WORKER_LOSSES, RestartBudget
from quire.ipc.protocol.messages import EngineCoreRequest, ErrorCode, FinishReason
from quire.ipc.protocol.step import SchedulerOutput, StepFailed


def make_engine(**options: Any) -> FakeEngine:
    return make_any_engine(64 * 9, max_num_seqs=64, max_num_batched_tokens=256, **options)


def make_requests(count: int, *, max_tokens: int = 12) -> list[EngineCoreRequest]:
    return [make_request(f"r{i}", [1 + i, 2, 3], max_tokens=max_tokens) for i in range(count)]


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
    engine.add_all(requests)
    engine.run()
    for i in poisoned:
        assert_convicted(engine, f"r{i}")
    engine.check_undisturbed([request for i, request in enumerate(requests) if i not in poisoned])
    assert engine.core.check_integrity() == []


def test_a_step_that_fails_once_fails_nobody() -> None:
    engine = make_engine()
    requests = make_requests(20)
    engine.add_all(requests)
    engine.turn()
    engine.worker.fail_next = "a hiccup"
    engine.run()
    engine.check_undisturbed(requests)


def test_requests_that_come_or_go_during_the_search_are_served_and_ended() -> None:
    engine = make_engine()
    requests = make_requests(32)
    engine.worker.poisoned.add("r20")
    engine.add_all(requests)
    engine.turn()  # the step fails, the search begins
    late = make_requests(40)[36:]
    engine.add_all(late)
    engine.core.abort_requests(b"client", ["r0", "r1", "r30", "r37"])  # under test, parked, just arrived
    engine.deliver()
    assert engine.core.check_integrity() == []
    engine.run()
    for gone in ("r0", "r1", "r30", "r37"):
        assert engine.finals[gone].finish_reason is FinishReason.ABORT
    assert_convicted(engine, "r20")
    others = [one for one in requests + late if one.request_id not in ("r0", "r1", "r20", "r30", "r37")]
    engine.check_undisturbed(others)


def test_a_whole_group_that_is_aborted_makes_way_for_the_next() -> None:
    engine = make_engine()
    requests = make_requests(4)
    engine.worker.poisoned.add("r3")
    engine.add_all(requests)
    engine.turn()
    engine.core.abort_requests(b"client", ["r0", "r1"])  # the first half
    engine.deliver()
    engine.run()
    assert_convicted(engine, "r3")
    engine.check_undisturbed([requests[2]])


def test_a_worker_that_is_killed_now_and_then_convicts_nobody() -> None:
    engine = make_engine()
    requests = make_requests(8, max_tokens=40)
    engine.add_all(requests)
    for _ in range(12):
        engine.turn()
        engine.turn()
        engine.launch()
        engine.lose_worker()
        assert engine.core.check_integrity() == []
    engine.run()
    engine.check_undisturbed(requests)


def test_requests_are_blamed_for_the_last_death_that_is_not_the_workers_own_and_for_none_after_it() -> None:
    """A request alone is convicted at its third death; one that has left before has moved all by one."""
    engine = make_engine()
    convicted: list[int] = []
    for number in range(1, MAX_DEATHS + 4):
        if not engine.core.num_unfinished:
            engine.add(make_request(f"r{number}", [1]))
        while engine.launch() is None:
            engine.clock.advance(1.0)
        engine.executor.pending.clear()
        if engine.core.failures.lose_worker("killed") is WorkerDeath.CONVICTED:
            convicted.append(number)
        if number == 1:
            engine.core.abort_requests(b"client", ["r1"])
        engine.deliver()
    assert convicted == list(range(4, MAX_DEATHS + 1, 3))
    assert convicted[-1] == MAX_DEATHS


@pytest.mark.parametrize("num_others", [0, 1, 15])
def test_a_request_that_kills_workers_fails_alone(num_others: int) -> None:
    engine = make_engine()
    others = make_requests(num_others)
    engine.add_all(
        [
            *others[: num_others // 2],
            make_request("lethal", [9, 9], max_tokens=5),
            *others[num_others // 2 :],
        ]
    )
    num_deaths = 0
    while "lethal" not in engine.finals:
        while engine.launch() is not None:
            pass
        rows = engine.executor.pending[0].rows if engine.executor.pending else []
        live = {request.row for request in engine.requests.values() if request.request_id == "lethal"}
        if live & set(rows):
            num_deaths += 1
            assert num_deaths < 20
            engine.lose_worker()
            engine.deliver()
        else:
            engine.turn()
    assert_convicted(engine, "lethal")
    engine.run()
    engine.check_undisturbed(others)
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize("kills_at", [2, 4, 10])
@pytest.mark.parametrize("num_others", [0, 3, 20])
@pytest.mark.parametrize("num_lethal", [1, 2, 8])
def test_who_kills_late_in_each_life_of_a_worker_fails_within_the_engines_budget(
    num_lethal: int, num_others: int, kills_at: int
) -> None:
    engine, budget = make_engine(), RestartBudget(MAX_WORKER_LOSSES)
    others = make_requests(num_others, max_tokens=100)
    lethal = [make_request(f"lethal{i}", [9, i + 1], max_tokens=100) for i in range(num_lethal)]
    engine.add_all((*others, *lethal))
    num_steps: dict[str, int] = {}  # that each was in since the worker's start
    num_deaths = 0
    while engine.core.num_unfinished:
        while engine.launch() is not None:
            pass
        if not engine.executor.pending:
            engine.clock.advance(1.0)
            continue
        rows = engine.executor.pending[0].rows
        for request in lethal:
            live = engine.requests.get(request.request_id)
            num_steps[request.request_id] = num_steps.get(request.request_id, 0) + bool(
                live and live.row in rows
            )
        if max(num_steps.values()) < kills_at:
            engine.finish_step()
            engine.clock.advance(-0.99)
            continue
        num_steps, num_deaths = {}, num_deaths + 1
        engine.executor.pending.clear()
        engine.worker.lose()
        now = engine.clock()
        death = engine.core.failures.lose_worker("killed", is_last_allowed=budget.is_spent_by_next(now))
        if death is WorkerDeath.CONVICTED:
            budget.forgive()
        elif death is WorkerDeath.UNEXPLAINED:
            assert budget.note_loss(now) is not None, "the engine has ended"
        engine.deliver()
    for request in lethal:
        assert_convicted(engine, request.request_id)
    assert num_deaths <= MAX_WORKER_LOSSES + 3 * num_lethal
    engine.check_undisturbed(others)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_those_who_wait_cost_a_search_nothing(policy: str) -> None:
    costs: list[int] = []
    for num_waiting in (1, 1000):
        engine = make_engine(policy=policy, run_ahead=1)
        engine.add_all(make_requests(64 + num_waiting))
        engine.turn()
        cost = 0
        for _ in range(2):  # the search begins, and its first group is halved
            engine.worker.fail_next = "a hiccup"
            engine.launch()
            answer = engine.executor.collect()
            assert isinstance(answer, StepFailed)
            cost += count_calls_of(partial(engine.core.failures.fail_step, answer))[0]
        costs.append(cost)
    assert costs[1] < costs[0] + 200  # to move each of them would be a thousand


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
    engine.add_all(requests)
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
            engine.check_undisturbed([request])


LIMIT_S, TEST_LIMIT_S, RESTART_S = 8.0, 3.0, 2.0
MAX_SILENCE_S = LIMIT_S + TEST_LIMIT_S + 2 * RESTART_S + 1.0  # a second for sound tests


class HangingEngine:
    """An engine; its steps with a culprit take too long, and the worker is killed and replaced."""

    def __init__(self, culprits: dict[str, int], step_s: float = 0.01) -> None:
        """Culprit -> the step with it that hangs, counted anew whenever it gets a row."""
        self.engine, self.culprits, self.step_s = make_engine(), culprits, step_s
        self.num_hangs = 0
        self.num_unexplained = 0  # deaths since the last conviction
        self.silences: dict[str, float] = {}  # the longest of each request
        self._heard: dict[str, tuple[int, float]] = {}
        self._num_calls: dict[str, int] = {}

    def run(self, requests: list[EngineCoreRequest]) -> None:
        engine = self.engine
        for request in requests:
            self.add(request)
        while self.turn():
            pass
        assert not engine.core.num_unfinished
        assert engine.core.check_integrity() == []

    def add(self, request: EngineCoreRequest) -> None:
        self.engine.add(request)
        self._heard[request.request_id] = 0, self.engine.clock()

    def turn(self) -> bool:
        """One step or one death; False if nothing is left to do."""
        engine = self.engine
        while engine.launch() is not None:
            pass
        if not engine.executor.pending:
            if not engine.core.num_unfinished:
                return False
            next_at = engine.core.next_schedule_at()
            assert next_at is not None
            engine.clock.advance(max(0.0, next_at - engine.clock()))
        elif self._hangs(engine.executor.pending[0]):
            self.num_hangs += 1
            assert self.num_hangs < 100, "it does not end"
            limit_s = TEST_LIMIT_S if engine.core.blame.is_searching else LIMIT_S
            engine.clock.advance(limit_s + RESTART_S)
            self.lose_worker()
        else:
            engine.finish_step()
            engine.clock.advance(self.step_s - 1.0)  # of which finish_step took a second
        self._listen()
        return True

    def lose_worker(self) -> None:
        engine = self.engine
        engine.executor.pending.clear()
        engine.worker.lose()
        death = engine.core.failures.lose_worker("too long", is_overdue=True)
        self.num_unexplained += death is WorkerDeath.UNEXPLAINED
        if death is WorkerDeath.CONVICTED:
            self.num_unexplained = 0
        assert self.num_unexplained <= 1, "the engine may lose no worker more for it"
        engine.deliver()

    def _hangs(self, step: SchedulerOutput) -> bool:
        for new in step.new_requests:
            self._num_calls[new.request_id] = 0
        hangs = False
        for request in self.engine.requests.values():
            if request.row in step.rows and request.request_id in self.culprits:
                self._num_calls[request.request_id] += 1
                hangs |= self._num_calls[request.request_id] >= self.culprits[request.request_id]
        return hangs

    def _listen(self) -> None:
        now = self.engine.clock()
        for name, (count, at) in self._heard.items():
            if len(self.engine.tokens[name]) > count or name in self.engine.finals:
                self.silences[name] = max(self.silences.get(name, 0.0), now - at)
                self._heard[name] = len(self.engine.tokens[name]), now


def assert_exactly(hanging: HangingEngine, requests: list[EngineCoreRequest]) -> float:
    """All culprits are convicted; as `assert_neighbours`."""
    for name in hanging.culprits:
        assert_convicted(hanging.engine, name)
    return assert_neighbours(hanging, requests)


def assert_neighbours(hanging: HangingEngine, requests: list[EngineCoreRequest]) -> float:
    """The others are undisturbed; returns their longest silence."""
    others = [request for request in requests if request.request_id not in hanging.culprits]
    hanging.engine.check_undisturbed(others)
    return max((hanging.silences[request.request_id] for request in others), default=0.0)


@pytest.mark.parametrize(
    ("num_others", "place", "grammar"),  # without a grammar it is like all others
    [
        (1, 1, "start: /a/"),
        (63, 3, "start: /a/"),
        (15, 0, ""),
        (15, 7, ""),
        (15, 15, ""),
    ],
)
def test_of_a_step_that_takes_too_long_the_culprit_costs_two_short_tests(
    num_others: int, place: int, grammar: str
) -> None:
    hanging = HangingEngine({"slow": 1})
    requests = make_requests(num_others, max_tokens=100)
    requests.insert(place, make_request("slow", [9, 9], max_tokens=5, grammar=grammar))
    hanging.run(requests)
    assert assert_exactly(hanging, requests) < MAX_SILENCE_S
    assert hanging.num_hangs == 3


@pytest.mark.parametrize(("count", "num_culprits"), [(2, 2), (7, 3), (7, 7), (64, 7)])
def test_several_that_hang_cost_two_workers_each_and_one(count: int, num_culprits: int) -> None:
    hanging = HangingEngine({f"r{count - 1 - i * (count // num_culprits)}": 1 for i in range(num_culprits)})
    requests = make_requests(count, max_tokens=100)
    hanging.run(requests)
    silence_s = assert_exactly(hanging, requests)
    assert hanging.num_hangs <= 2 * num_culprits + 1
    assert silence_s < LIMIT_S + num_culprits * (TEST_LIMIT_S + 2 * RESTART_S) + 1.0


@pytest.mark.parametrize(
    ("count", "hangs_at"), [(1, 2), (1, 16), (2, 4), (2, 10), (7, 2), (7, 10), (7, 16), (64, 4)]
)
def test_a_hang_that_comes_back_late_is_found_by_longer_tests(count: int, hangs_at: int) -> None:
    hanging = HangingEngine({f"r{count // 2}": hangs_at})
    requests = make_requests(count, max_tokens=100)
    hanging.run(requests)
    silence_s = assert_exactly(hanging, requests)
    assert hanging.num_hangs <= 2 + 2 + (1 if count * hangs_at < 256 else 6)  # more where groups are tested
    assert silence_s < MAX_SILENCE_S + 0.01 * max(256, 8 * hangs_at)


@pytest.mark.parametrize("late", [(4, 4), (1, 4), (4, 9), (1, 1, 4, 9)])
def test_late_and_early_hangs_at_once_end_exactly_their_requests(late: tuple[int, ...]) -> None:
    hanging = HangingEngine({f"r{2 * i}": hangs_at for i, hangs_at in enumerate(late)})
    requests = make_requests(12, max_tokens=100)
    hanging.run(requests)
    assert_exactly(hanging, requests)
    assert hanging.num_hangs <= 5 * len(late)


def test_culprits_that_come_one_after_the_other_cost_old_neighbours_no_long_tests() -> None:
    names = [f"slow{i}" for i in range(4)]
    hanging = HangingEngine(dict.fromkeys(names, 1), step_s=0.4)
    neighbours = make_requests(6, max_tokens=120)
    for request in neighbours:
        hanging.add(request)
    for name in names:
        for _ in range(8):
            assert hanging.turn()
        hanging.add(make_request(name, [9, 9], max_tokens=5))
        while name not in hanging.engine.finals:
            assert hanging.turn()
    hanging.run([])
    assert assert_exactly(hanging, neighbours) < MAX_SILENCE_S + 6 * hanging.step_s
    assert hanging.num_hangs == 3 * len(names)


@settings(max_examples=50, deadline=None)
@example(hangs_at=3, num_others=0, newcomers_at=[2], accident_at=6)
@example(hangs_at=3, num_others=1, newcomers_at=[2], accident_at=10)
@given(
    hangs_at=st.integers(1, 6),
    num_others=st.integers(0, 3),
    newcomers_at=st.lists(st.integers(0, 30), max_size=3),
    accident_at=st.integers(0, 40),
)
def test_one_accident_beside_hangs_ends_nobody_else(
    hangs_at: int, num_others: int, newcomers_at: list[int], accident_at: int
) -> None:
    hanging = HangingEngine({"slow": hangs_at})
    requests = [make_request("slow", [9, 9], max_tokens=40), *make_requests(num_others, max_tokens=20)]
    for request in requests:
        hanging.add(request)
    goes_on, num_turns = True, 0
    while goes_on or num_turns <= max(newcomers_at, default=0):
        for _ in range(newcomers_at.count(num_turns)):
            requests.append(make_request(f"new{len(requests)}", [len(requests), 5], max_tokens=12))
            hanging.add(requests[-1])
        goes_on = hanging.turn()
        num_turns += 1
        if num_turns == accident_at:
            hanging.engine.launch()
            hanging.engine.lose_worker()
    assert_neighbours(hanging, requests)


def test_a_long_prompt_beside_two_deaths_and_alone_at_a_third_is_not_convicted() -> None:
    engine = make_any_engine(64, max_num_batched_tokens=8)
    long = make_request("long", [1 + i % 7 for i in range(100)], max_tokens=4)
    requests = [*make_requests(1, max_tokens=40), long]
    for request in requests:
        engine.add(request)
    for _ in range(3):  # two deaths by who gets tokens, then an accident while the prompt is tested
        engine.turn()
        engine.turn()
        engine.launch()
        engine.lose_worker()
    engine.run()
    engine.check_undisturbed(requests)


@pytest.mark.parametrize("leaves_during_step", [False, True])
@pytest.mark.parametrize("num_others", [0, 3])
def test_clients_that_leave_before_the_verdict_do_not_end_the_engine(
    num_others: int, leaves_during_step: bool
) -> None:
    hanging = HangingEngine({f"slow{i}": 1 for i in range(8)})
    for i in range(8):
        others = [make_request(f"r{i}-{j}", [i + 1, j, 2], max_tokens=5) for j in range(num_others)]
        for request in [*others, make_request(f"slow{i}", [9, i], max_tokens=5)]:
            hanging.add(request)
        if leaves_during_step:
            hanging.engine.launch()
        while hanging.num_hangs == i and not leaves_during_step:
            assert hanging.turn()
        hanging.engine.core.abort_requests(b"client", [f"slow{i}"])
        hanging.engine.deliver()
        if leaves_during_step:
            hanging.engine.clock.advance(LIMIT_S + RESTART_S)
            hanging.lose_worker()
        hanging.run([])  # asserts that no more than one death is unexplained
        assert_neighbours(hanging, others)


def test_a_newcomer_that_hangs_late_costs_old_neighbours_no_long_tests() -> None:
    hanging = HangingEngine({"slow0": 1, "slow1": 3}, step_s=0.4)
    neighbours = make_requests(6, max_tokens=120)
    for request in neighbours:
        hanging.add(request)
    hanging.add(make_request("slow0", [9, 9], max_tokens=5))
    while not hanging.num_hangs:
        assert hanging.turn()
    hanging.engine.core.abort_requests(b"client", ["slow0"])  # its client does not wait for the verdict
    hanging.engine.deliver()
    for _ in range(40):
        assert hanging.turn()
    hanging.add(make_request("slow1", [8, 8], max_tokens=20))
    while "slow1" not in hanging.engine.finals:
        assert hanging.turn()
    hanging.run([])
    assert_convicted(hanging.engine, "slow1")
    tests_s = 6 * 10 * hanging.step_s
    assert assert_neighbours(hanging, neighbours) < MAX_SILENCE_S + tests_s


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 20),
    culprits=st.dictionaries(st.integers(0, 19), st.integers(1, 30), max_size=5),
)
def test_whoever_hangs_and_when_exactly_those_end(count: int, culprits: dict[int, int]) -> None:
    hanging = HangingEngine({f"r{i}": at for i, at in culprits.items() if i < count})
    requests = make_requests(count, max_tokens=90)
    hanging.run(requests)
    assert_neighbours(hanging, requests)
    for name, hangs_at in hanging.culprits.items():
        if hangs_at == 1:  # others may come to their end before they hang again
            assert_convicted(hanging.engine, name)
    assert hanging.num_hangs <= 1 + 6 * len(hanging.culprits)


def test_who_is_not_suspected_runs_as_long_as_it_was_held_up_before_the_next_test() -> None:
    engine = make_engine()
    suspects, late = make_requests(2), make_request("late", [5, 5], max_tokens=60)
    engine.add_all(suspects)
    engine.launch()
    engine.lose_worker(is_overdue=True)
    held_since = engine.clock()
    engine.launch()  # a test
    engine.add(late)
    engine.clock.advance(5.0)
    engine.lose_worker(is_overdue=True)
    while engine.core.blame.is_testing:  # the other one, which is cleared
        assert engine.turn()
    began = engine.clock()
    while not engine.core.blame.is_testing:
        assert engine.turn()
    assert engine.clock() - began == pytest.approx(began - held_since, abs=2.0)  # a turn takes a second
    assert 3 <= len(engine.tokens["late"]) < 10
    engine.run()
    engine.check_undisturbed([*suspects, late])
