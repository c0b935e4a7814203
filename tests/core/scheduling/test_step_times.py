"""Long prompts beside streams, on a worker whose steps take as long as a model of its device says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.scheduling.step import Step
from quire.core.scheduling.step_times import MIN_CHUNK
from quire.ipc.spec.config import SchedulerConfig

POLICIES = ("fcfs", "priority", "fair")
NUM_STREAMS = 16
LONG = 8192


@dataclass(frozen=True)
class Device:
    """What a step takes: pass_s, for each token of a prompt token_s, and context_s a token before it."""

    pass_s: float
    token_s: float
    context_s: float = 0.0
    spike_s: float = 0.0  # more, of one step in forty


SMALL_MODEL = Device(0.05, 1.1e-3, 2e-7)  # 1.2 GB of weights on two cores: as measured
TINY_MODEL = Device(0.004, 1.5e-4, 2e-8)
LARGE_GPU = Device(0.008, 5e-6)


class Timeline:
    """Streams that have begun, and what their steps take from then on."""

    def __init__(self, device: Device, **options: Any) -> None:
        self.device = device
        values: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, **options}
        scheduler = SchedulerConfig(**values)
        config = make_config(max_model_len=LONG + 64, block_size=16, scheduler=scheduler)
        self.engine = FakeEngine(config, num_blocks=6000, verify=False)
        self.num_steps = 0
        self.chunks: list[int] = []  # prompt tokens of each step that decoded, too
        self.steps_s: list[float] = []  # what those took
        self.ended_at = self.engine.clock.now

    def begin_streams(self, num_steps: int = 30, client: bytes = b"streams") -> None:
        for i in range(NUM_STREAMS):
            self.engine.add(make_request(f"s{i}", [i + 1] * 32, max_tokens=8000), client)
        self.run(lambda: self.num_steps > num_steps)
        self.chunks.clear()
        self.steps_s.clear()

    def take_long(self, *names: str, client: bytes = b"long") -> float:
        """How long it takes until the first tokens of these prompts are there."""
        began = self.engine.clock.now
        for number, name in enumerate(names):
            self.engine.add(make_request(name, [17 + number] * LONG, max_tokens=1), client)
        self.run(lambda: all(name in self.engine.finals for name in names))
        return self.engine.clock.now - began

    def run(self, is_done: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if is_done():
                return
            while self.engine.launch() is not None:
                pass
            step = self.engine.scheduler.in_flight[0]
            step_s = self.measure(step)
            self.engine.clock.now = max(step.launched_at, self.ended_at) + step_s
            self.ended_at = self.engine.clock.now
            self.num_steps += 1
            if len(step.rows) > len(step.chunks):
                self.chunks.append(sum(count for _, count in step.chunks))
                self.steps_s.append(step_s)
            self.engine.core.update(self.engine.executor.collect())  # pyright: ignore[reportArgumentType]
            self.engine.deliver()
        raise AssertionError("no end after 20,000 steps")

    def measure(self, step: Step) -> float:
        prompt_s = sum(
            count * (self.device.token_s + self.device.context_s * (at + count / 2))
            for at, count in step.chunks
        )
        return self.device.pass_s + prompt_s + self.device.spike_s * (self.num_steps % 40 == 0)

    def find_gap(self, share: float = 0.99) -> float:
        """So many of the steps that decode take this long at most."""
        return sorted(self.steps_s)[int(share * (len(self.steps_s) - 1))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("device", [SMALL_MODEL, TINY_MODEL, LARGE_GPU])
def test_streams_wait_for_a_long_prompt_at_most_twice_as_long_or_a_tenth_of_a_second(
    policy: str, run_ahead: int, device: Device
) -> None:
    timeline = Timeline(device, policy=policy, run_ahead=run_ahead)
    timeline.begin_streams()
    timeline.take_long("long")
    allowed_s = max(0.1, 2 * device.pass_s)
    assert timeline.find_gap() <= 1.05 * allowed_s
    assert max(timeline.steps_s) <= 1.5 * allowed_s


@pytest.mark.parametrize("device", [TINY_MODEL, LARGE_GPU])
def test_where_passes_are_short_the_prompt_takes_a_quarter_longer_at_most(device: Device) -> None:
    by_tokens = Timeline(device, max_gap_ms=0)
    by_tokens.begin_streams()
    timeline = Timeline(device)
    timeline.begin_streams()
    assert timeline.take_long("long") <= 1.25 * by_tokens.take_long("long")


def test_where_weights_take_half_of_a_step_the_prompt_takes_twice_as_long_at_most() -> None:
    by_tokens = Timeline(SMALL_MODEL, max_gap_ms=0)
    by_tokens.begin_streams()
    timeline = Timeline(SMALL_MODEL)
    timeline.begin_streams()
    assert timeline.take_long("long") <= 2.0 * by_tokens.take_long("long")
    assert by_tokens.find_gap() > 10 * timeline.find_gap()


def test_a_longer_gap_that_is_allowed_is_used_and_shortens_the_prompt() -> None:
    timeline = Timeline(SMALL_MODEL, max_gap_ms=250)
    timeline.begin_streams()
    by_tokens = Timeline(SMALL_MODEL, max_gap_ms=0)
    by_tokens.begin_streams()
    assert timeline.take_long("long") <= 1.25 * by_tokens.take_long("long")
    assert 0.2 < timeline.find_gap() <= 0.26


def test_a_gap_that_no_step_can_keep_leaves_each_step_some_of_the_prompt() -> None:
    timeline = Timeline(SMALL_MODEL, max_gap_ms=1)
    timeline.begin_streams()
    timeline.take_long("long")
    chunks = timeline.chunks[5:-2]
    assert set(chunks) == {0, MIN_CHUNK}
    assert chunks.count(0) <= 1 + len(chunks) // 32  # which show what decodes take alone


def test_without_streams_a_prompt_has_whole_steps() -> None:
    timeline = Timeline(SMALL_MODEL)
    timeline.take_long("first")
    assert timeline.num_steps == LONG // 2048
    assert timeline.chunks == []


def test_streams_that_come_during_a_long_prompt_find_short_steps_soon() -> None:
    """What a pass takes is not known yet, so a step is kept free of the prompt."""
    timeline = Timeline(SMALL_MODEL, max_num_batched_tokens=512, policy="fair")
    timeline.engine.add(make_request("long", [99] * LONG, max_tokens=1), b"long")
    timeline.run(lambda: timeline.num_steps == 2)
    timeline.begin_streams(num_steps=6)
    timeline.run(lambda: "long" in timeline.engine.finals)
    assert max(timeline.steps_s[5:]) <= 0.105


@pytest.mark.parametrize("policy", POLICIES)
def test_several_long_prompts_share_what_one_has(policy: str) -> None:
    timeline = Timeline(SMALL_MODEL, policy=policy)
    timeline.begin_streams()
    timeline.take_long("long", "longer", "longest")
    assert timeline.find_gap() <= 0.105
    assert max(timeline.steps_s) <= 0.16


def test_a_stall_changes_what_is_expected_by_a_bounded_part() -> None:
    steady = Timeline(SMALL_MODEL)
    steady.begin_streams()
    usual_s = steady.take_long("long")
    timeline = Timeline(Device(0.05, 1.1e-3, 2e-7, spike_s=10.0))
    timeline.begin_streams()
    lasted_s = timeline.take_long("long")
    num_stalls = sum(step_s > 5 for step_s in timeline.steps_s)
    assert num_stalls > 3
    assert lasted_s - 10.0 * num_stalls <= 1.35 * usual_s
    assert timeline.find_gap(0.9) <= 0.12


class SlowTimeline(Timeline):
    """Everything takes three times as long once a long prompt has come."""

    is_slow = False

    def measure(self, step: Step) -> float:
        self.is_slow |= any(count > 32 for _, count in step.chunks)
        return super().measure(step) * (3.0 if self.is_slow else 1.0)


def test_what_a_pass_takes_is_looked_at_again_during_a_long_prompt() -> None:
    steady = Timeline(SMALL_MODEL)
    steady.begin_streams()
    timeline = SlowTimeline(SMALL_MODEL)
    timeline.begin_streams()
    assert timeline.take_long("long") <= 3 * 1.1 * steady.take_long("long")
    assert timeline.find_gap() <= 0.31


class UnevenTimeline(Timeline):
    """A step with a few tokens of a prompt happens to take less than a pass."""

    def measure(self, step: Step) -> float:
        is_short = 0 < sum(count for _, count in step.chunks) < MIN_CHUNK
        return 0.8 * self.device.pass_s if is_short else super().measure(step)


def test_short_prompts_that_seem_to_take_nothing_say_nothing_of_long_ones() -> None:
    timeline = UnevenTimeline(SMALL_MODEL)
    timeline.begin_streams()
    for number in range(40):
        timeline.engine.add(make_request(f"short{number}", [number, 3], max_tokens=1), b"long")
        timeline.run(lambda name=f"short{number}": name in timeline.engine.finals)
    timeline.take_long("long")
    assert max(timeline.steps_s) <= 0.16


def test_of_two_stages_each_has_half_of_the_gap() -> None:
    timeline = Timeline(TINY_MODEL, num_stages=2, max_gap_ms=100)
    timeline.begin_streams()
    timeline.take_long("long")
    assert timeline.find_gap() <= 0.055


def test_endless_long_prompts_all_end_beside_streams_without_end() -> None:
    timeline = Timeline(SMALL_MODEL)
    timeline.begin_streams()
    for i in range(3):
        timeline.take_long(f"long {i}", f"too {i}")
    assert timeline.engine.core.check_integrity() == []
