"""What a flood costs others in time, on a worker that takes as long as a model of its device says."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.policies.step_pacer import MAX_TURNS, WINDOW_S
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.protocol.step import SchedulerOutput
from quire.ipc.spec.config import SchedulerConfig
from quire.ipc.spec.model_spec import PoolingSpec

TRANSPORT_S = 3e-3  # of a first token that no step is to blame for: frontend, sockets

DurationOf = Callable[[int, int], float]  # of a step, by its tokens and those of them that are sampled


def small_cpu(num_tokens: int, num_sampled: int) -> float:
    """As the pocket model on 2 cores: a decode costs as much as a token of a prompt, or more."""
    return 1.5e-3 + 80e-6 * num_tokens + 60e-6 * num_sampled


def large_gpu(num_tokens: int, num_sampled: int) -> float:
    """Weights are read once a step, whatever is in it."""
    return 8e-3 + 5e-6 * num_tokens + 2e-6 * num_sampled


@dataclass
class Timeline:
    """The busy loop beside a worker, in the time of the engine's clock."""

    duration_of: DurationOf
    run_ahead: int = 2
    max_num_seqs: int = 64
    num_flood_tokens: int = 0
    is_encoder: bool = False  # all requests ask for a vector, and nothing decodes
    first_token_s: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        scheduler = SchedulerConfig(
            policy="fair",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=2048,
            run_ahead=self.run_ahead,
        )
        pooling = PoolingSpec(pools=("last",)) if self.is_encoder else None
        config = make_config(max_model_len=1024, block_size=16, scheduler=scheduler, pooling=pooling)
        self.engine = FakeEngine(config, num_blocks=self.max_num_seqs * 40, verify=False)
        self.ends: deque[float] = deque()  # of the steps in flight
        self.arrivals: dict[str, float] = {}
        self.num_flood = 0
        self.has_flood = False

    @property
    def now(self) -> float:
        return self.engine.clock.now

    def run_until(self, at: float) -> None:
        while (event := self.find_next(at)) < at:
            self.engine.clock.now = event
            self.take_turn()
        self.engine.clock.now = at

    def find_next(self, at: float) -> float:
        events = [at]
        if self.ends:
            events.append(self.ends[0])
        submit_at = self.engine.core.next_schedule_at()
        if submit_at is not None:
            events.append(max(submit_at, self.now + 1e-6))
        return min(events)

    def take_turn(self) -> None:
        if self.ends and self.ends[0] <= self.now:
            self.ends.popleft()
            self.engine.core.update(self.engine.executor.collect())  # pyright: ignore[reportArgumentType]
            self.engine.deliver()
            self.count_tokens()
            self.top_up()
        while (step := self.engine.launch()) is not None:
            self.submit(step)

    def submit(self, step: SchedulerOutput) -> None:
        num_sampled = len(self.engine.newest_step.sampled)
        began = max(self.now, self.ends[-1] if self.ends else self.now)
        self.ends.append(began + self.duration_of(sum(step.num_tokens), num_sampled))

    def count_tokens(self) -> None:
        for output in self.engine.outputs:
            if output.request_id.startswith("flood"):
                self.num_flood_tokens += 1 if self.is_encoder else len(output.new_token_ids)
            elif output.start == 0 and output.request_id in self.arrivals:
                self.first_token_s.append(self.now - self.arrivals[output.request_id] + TRANSPORT_S)
        self.engine.outputs.clear()

    def top_up(self) -> None:
        """The flood has more waiting than can run."""
        while self.has_flood and self.engine.core.num_unfinished < self.max_num_seqs * 5 // 4:
            self.num_flood += 1
            name = f"flood{self.num_flood}"
            prompt = [self.num_flood % 997, self.num_flood // 997] * 50
            max_tokens = 50 + self.num_flood * 37 % 250  # few end in one step
            self.engine.add(self.make_request(name, prompt, max_tokens), b"heavy")

    def make_request(self, name: str, prompt: list[int], max_tokens: int) -> EngineCoreRequest:
        if self.is_encoder:
            return make_request(name, prompt, pooling_params=PoolingParams(task="embed"))
        return make_request(name, prompt, max_tokens=max_tokens)

    def begin_flood(self, seconds: float = 2.5) -> None:
        self.has_flood = True
        self.top_up()
        self.take_turn()
        self.run_until(self.now + seconds)

    def send_light(self, num_requests: int, prompt_len: int) -> float:
        """One each 0.2 s, at odd moments of a step; the median time to first token."""
        self.first_token_s.clear()
        for i in range(num_requests):
            self.run_until(self.now + 0.2 + 0.0017 * (i % 7))
            name = f"light{len(self.arrivals)}"
            self.arrivals[name] = self.now
            prompt = [len(self.arrivals), 5] * (prompt_len // 2)
            self.engine.add(self.make_request(name, prompt, 8), b"light")
            self.take_turn()
        self.run_until(self.now + 1.0)
        assert len(self.first_token_s) == num_requests
        return statistics.median(self.first_token_s)

    def measure_flood_rate(self, seconds: float) -> float:
        before = self.num_flood_tokens
        self.run_until(self.now + seconds)
        return (self.num_flood_tokens - before) / seconds


@pytest.mark.parametrize(
    ("prompt_len", "duration_of", "run_ahead"),
    [(64, small_cpu, 1), (400, small_cpu, 2), (64, large_gpu, 2), (400, large_gpu, 1)],
)
def test_a_flood_at_most_doubles_the_median_time_to_first_token(
    prompt_len: int, duration_of: DurationOf, run_ahead: int
):
    alone = Timeline(duration_of, run_ahead).send_light(9, prompt_len)
    flooded = Timeline(duration_of, run_ahead)
    flooded.begin_flood()
    assert flooded.send_light(9, prompt_len) <= 2 * alone
    assert flooded.engine.core.check_integrity() == []


def measure_rates(duration_of: DurationOf) -> tuple[float, float]:
    """The flood's tokens/s alone, and beside a light client."""
    timeline = Timeline(duration_of)
    timeline.begin_flood()
    alone = timeline.measure_flood_rate(1.0)
    timeline.send_light(5, 64)
    began, before = timeline.now, timeline.num_flood_tokens
    timeline.send_light(6, 64)
    return alone, (timeline.num_flood_tokens - before) / (timeline.now - began)


def test_where_long_steps_cost_newcomers_the_flood_keeps_half_of_its_rate():
    alone, beside = measure_rates(small_cpu)
    assert 0.5 * alone < beside < alone


def test_where_a_decode_step_is_as_short_as_a_prompt_the_flood_is_not_limited():
    alone, beside = measure_rates(large_gpu)
    assert beside > 0.85 * alone


def test_ten_seconds_after_the_last_newcomer_steps_are_full_and_run_ahead_again():
    timeline = Timeline(small_cpu)
    timeline.begin_flood(seconds=4.0)
    alone = timeline.measure_flood_rate(2.0)
    timeline.send_light(5, 64)
    assert timeline.measure_flood_rate(2.0) < 0.95 * alone
    timeline.engine.clock.advance(WINDOW_S - 2.0)  # the machine slept
    timeline.ends = deque(max(end, timeline.now) for end in timeline.ends)
    timeline.run_until(timeline.now + 1.0)
    assert timeline.engine.core.next_schedule_at() is None
    assert timeline.engine.core.num_in_flight == 2
    assert timeline.measure_flood_rate(2.0) == pytest.approx(alone, rel=0.04)


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_vectors_without_end_keep_anothers_short_but_for_the_first_two(run_ahead: int) -> None:
    """Before these nobody knows that others come, and a step of the flood takes 0.17 s."""
    timeline = Timeline(small_cpu, run_ahead, is_encoder=True)
    alone_s = timeline.send_light(3, 12)
    timeline.begin_flood()
    rate = timeline.measure_flood_rate(5.0)
    timeline.send_light(2, 12)
    timeline.send_light(40, 12)
    assert max(timeline.first_token_s) <= 2 * alone_s + 0.04
    assert timeline.measure_flood_rate(WINDOW_S / 2) >= 0.9 * rate


def test_with_one_tenant_no_step_is_limited_or_late():
    timeline = Timeline(small_cpu)
    timeline.begin_flood()
    timeline.engine.add(make_request("one_more", [3] * 64, max_tokens=8), b"heavy")
    timeline.run_until(timeline.now + 2.0)
    assert timeline.engine.core.next_schedule_at() is None
    assert all(not step.policy_data.limited for step in timeline.engine.scheduler.in_flight)


def test_without_the_flood_no_step_of_its_neighbour_is_late():
    timeline = Timeline(small_cpu)
    timeline.begin_flood()
    timeline.send_light(3, 64)
    timeline.has_flood = False
    timeline.engine.core.remove_client(b"heavy")
    timeline.engine.add(make_request("long", [3] * 64, max_tokens=500), b"light")
    timeline.take_turn()
    timeline.run_until(timeline.now + 0.3)
    assert timeline.engine.core.num_in_flight == 2
    assert timeline.engine.core.next_schedule_at() is None


def test_newcomers_without_end_leave_the_flood_every_second_step_and_each_row_its_turn():
    timeline = Timeline(small_cpu)
    timeline.begin_flood()
    scheduler = timeline.engine.scheduler
    waits: dict[str, int] = {}
    longest = num_exclusive = 0
    was_exclusive, last_step = False, scheduler.in_flight[-1]
    for i in range(400):
        timeline.arrivals[f"light{i}"] = timeline.now
        timeline.engine.add(make_request(f"light{i}", [i, 3] * 32, max_tokens=1), b"light")
        while scheduler.in_flight[-1] is last_step:
            timeline.engine.clock.now = timeline.find_next(timeline.now + 1.0)
            timeline.take_turn()
        last_step = scheduler.in_flight[-1]
        assert not (last_step.policy_data.is_exclusive and was_exclusive)
        was_exclusive = last_step.policy_data.is_exclusive
        num_exclusive += was_exclusive
        in_step = {request.request_id for request in last_step.requests}
        waits = {
            request.request_id: waits.get(request.request_id, 0) + 1
            for request in scheduler.running
            if request.request_id not in in_step
        }
        longest = max(longest, *waits.values(), 0)
    assert num_exclusive > 50
    assert longest <= 4 * MAX_TURNS


def test_a_step_that_something_held_up_hardly_changes_what_is_expected():
    timeline = Timeline(small_cpu)
    timeline.begin_flood()
    before = timeline.send_light(6, 64)
    timeline.engine.clock.advance(60.0)  # the machine slept: the step in flight took a minute
    timeline.ends = deque(max(end, timeline.now) for end in timeline.ends)
    assert timeline.send_light(6, 64) < 1.5 * before
