"""What the core counts: rates over the last seconds, histograms, and how requests ended."""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec
import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.stats.stats import WINDOW_S, EngineCounters, RateWindow
from quire.core.stats.stats_collector import CoreProcessInfo
from quire.ipc.params.pooling_params import PoolingParams
from quire.ipc.protocol.engine_views import EngineSnapshot, Histogram
from quire.ipc.protocol.messages import FinishReason
from quire.ipc.spec.config import SchedulerConfig
from quire.ipc.spec.model_spec import PoolingSpec


def make_engine(**scheduler: object) -> FakeEngine:
    return FakeEngine(make_config(scheduler=SchedulerConfig(**scheduler)), 64)  # pyright: ignore


def step_and_wait(engine: FakeEngine, seconds: float) -> None:
    """One step, `seconds` from launch to result."""
    engine.launch()
    engine.clock.advance(seconds)
    engine.finish_step()
    engine.clock.advance(-1.0)  # which finish_step lets pass


def look(engine: FakeEngine) -> EngineSnapshot:
    return engine.core.snapshot(CoreProcessInfo("epoch", 0.0))


def histogram(engine: FakeEngine, name: str) -> Histogram:
    return engine.core.metrics().histograms[name]


def count_at_most(found: Histogram, bound: float) -> int:
    return list(accumulate(found.counts))[found.bounds.index(bound)]


# -- rates


@pytest.fixture
def counters() -> EngineCounters:
    return EngineCounters()


@pytest.fixture
def window(counters: EngineCounters) -> RateWindow:
    """Work began at 100."""
    window = RateWindow(counters, lambda _now, _is_start: None)
    window.note(100.0, is_start=True)
    return window


def test_a_rate_is_what_was_counted_over_the_time_since_work_began(
    counters: EngineCounters, window: RateWindow
):
    counters.generation_tokens, counters.num_steps, counters.update_s = 30, 10, 0.02
    rates = window.measure(102.0)
    assert rates.generation_tokens_per_s == pytest.approx(15.0)
    assert rates.steps_per_s == pytest.approx(5.0)
    assert rates.update_ms == pytest.approx(2.0)


def test_an_idle_engine_shows_zero_and_earlier_work_is_forgotten(
    counters: EngineCounters, window: RateWindow
):
    counters.generation_tokens += 1000
    assert window.measure(101.0).generation_tokens_per_s > 0
    assert window.measure(100.0 + WINDOW_S + 0.01).generation_tokens_per_s == 0
    window.note(200.0, is_start=True)
    counters.generation_tokens += 7
    assert window.measure(201.0).generation_tokens_per_s == pytest.approx(7.0)


def test_steps_longer_than_the_window_do_not_look_fast(counters: EngineCounters, window: RateWindow):
    window.note(110.0, is_start=False)  # the result of a step of 10 s
    counters.prompt_tokens += 100
    assert window.measure(110.1).prompt_tokens_per_s == pytest.approx(100 / WINDOW_S)


def test_a_clock_that_is_set_back_does_not_stop_the_rates(counters: EngineCounters, window: RateWindow):
    window.note(1.0, is_start=False)
    counters.generation_tokens += 10
    assert window.measure(2.0).generation_tokens_per_s > 0


def test_a_running_engine_shows_its_tokens_a_second_from_when_work_began():
    engine = make_engine()
    for name in "abcd":
        engine.add(make_request(name, [1, 2, 3], max_tokens=120))
    step_and_wait(engine, 1.0)
    first = look(engine)
    assert first.generation_tokens_per_s == pytest.approx(4.0)
    assert first.prompt_tokens_per_s == pytest.approx(12.0)
    for _ in range(100):
        step_and_wait(engine, 0.1)
    later = look(engine)
    assert later.generation_tokens_per_s == pytest.approx(40.0, rel=0.1)
    assert later.steps_per_s == pytest.approx(10.0, rel=0.1)


# -- histograms


def test_a_value_on_a_bound_lies_below_it_and_the_rest_goes_past_the_last():
    found = Histogram(bounds=(1.0, 2.0), counts=[0, 0, 0])
    found.observe(1.0)
    found.observe(1.5, times=3)
    found.observe(9.0)
    assert (found.counts, found.sum) == ([1, 3, 1], 1.0 + 4.5 + 9.0)


def test_times_of_a_request_are_those_of_its_life():
    engine = make_engine()
    arrival = engine.clock.now - 1.0
    engine.add(make_request("a", [1, 2, 3], max_tokens=3, arrival_time=arrival))
    engine.clock.advance(2.0)
    step_and_wait(engine, 0.4)  # first token 3.4 s after arrival, 2.4 after it was queued
    step_and_wait(engine, 0.02)
    step_and_wait(engine, 0.02)
    expected = {
        "time_to_first_token_seconds": 3.4,
        "e2e_request_latency_seconds": 3.44,
        "request_queue_time_seconds": 2.0,
        "request_prefill_time_seconds": 0.4,
        "request_decode_time_seconds": 0.04,
        "request_inference_time_seconds": 0.44,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3,
        "request_params_max_tokens": 3,
        "request_params_n": 1,
    }
    found = engine.core.metrics().histograms
    assert {name: found[name].sum for name in expected} == pytest.approx(expected)
    assert all(sum(found[name].counts) == 1 for name in expected)


def test_every_token_after_a_requests_first_has_a_gap():
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    for _ in range(5):
        step_and_wait(engine, 0.03)
    engine.add(make_request("b", [4, 5, 6], max_tokens=5))  # its first token joins a step of the other's
    while engine.core.num_unfinished:
        step_and_wait(engine, 0.03)
    gaps = histogram(engine, "inter_token_latency_seconds")
    assert sum(gaps.counts) == 19 + 4
    assert count_at_most(gaps, 0.025) == 0
    assert count_at_most(gaps, 0.05) == 23
    assert gaps.sum == pytest.approx(23 * 0.03)


def test_each_request_has_its_own_gap_across_a_lost_worker_as_long_as_it_was():
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=4)
    for name in "ab":
        engine.add(make_request(name, list(range(40)), max_tokens=30, cache_salt=name))
    while len(engine.tokens["b"]) == 0:
        step_and_wait(engine, 0.03)
    before = histogram(engine, "inter_token_latency_seconds")
    engine.lose_worker()
    engine.clock.advance(3.0)
    while engine.core.num_unfinished:
        step_and_wait(engine, 0.03)
    gaps = histogram(engine, "inter_token_latency_seconds")
    assert count_at_most(before, 2.5) == sum(before.counts)
    assert sum(gaps.counts) - count_at_most(gaps, 2.5) == 2
    assert sum(gaps.counts) == 29 + 29


def test_a_request_that_another_engine_began_has_no_first_token_here():
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], output=[7], max_tokens=3))
    engine.run()
    assert sum(histogram(engine, "time_to_first_token_seconds").counts) == 0
    assert sum(histogram(engine, "e2e_request_latency_seconds").counts) == 1


def test_tokens_of_steps_are_counted_by_their_number():
    engine = make_engine()
    engine.add(make_request("a", list(range(10)), max_tokens=3))
    engine.run()
    steps = histogram(engine, "iteration_tokens_total")
    assert (sum(steps.counts), steps.sum) == (3, 10 + 1 + 1)


def test_all_bounds_rise_and_those_of_lengths_end_at_the_models():
    histograms = make_engine().core.metrics().histograms
    for found in histograms.values():
        assert all(a < b for a, b in pairwise(found.bounds))
        assert len(found.counts) == len(found.bounds) + 1
    assert histograms["request_prompt_tokens"].bounds == (1, 2, 5, 10, 20, 50, 100)
    latencies = histograms["e2e_request_latency_seconds"]
    for value in (0.003, 0.012):  # as vectors take
        latencies.observe(value)
    assert [count_at_most(latencies, bound) for bound in (0.002, 0.005, 0.01, 0.02)] == [0, 1, 1, 2]


# -- ends


def test_every_end_is_counted_under_its_reason():
    engine = make_engine()
    assert engine.core.metrics().finished_total == {str(reason): 0 for reason in FinishReason}
    engine.add(make_request("length", [1], max_tokens=1))
    engine.run()
    engine.add(make_request("abort", [1], max_tokens=9))
    engine.core.abort_requests(b"client", ["abort"])
    engine.add(make_request("refused", [1] * 1000, max_tokens=9))
    engine.worker.bad.add("bad")
    engine.add(make_request("bad", [1], max_tokens=9))
    engine.run()
    expected = {"stop": 0, "length": 1, "abort": 1, "error": 2, "repetition": 0}
    assert engine.core.metrics().finished_total == expected


def test_ends_are_counted_by_what_was_asked_for():
    engine = FakeEngine(make_config(pooling=PoolingSpec()), 64)
    engine.add(make_request("plain", [1], max_tokens=1))
    engine.add(make_request("grammar", [1], max_tokens=1, grammar="start: /a/"))
    for name, num_sequences in (("search", 2), ("beam a", 0), ("beam b", 0)):  # its first round, its second
        beam = make_request(name, [1], max_tokens=1, purpose="beam_search")
        engine.add(msgspec.structs.replace(beam, is_continued=True, num_sequences=num_sequences))
    engine.add(make_request("tools", [1], max_tokens=1, grammar="start: /a/", purpose="tools"))
    engine.add(make_request("vector", [1], pooling_params=PoolingParams(task="embed")))
    engine.run()
    counts = {"plain": 1, "grammar": 1, "beam_search": 1, "tools": 1, "thinking": 0, "pooling": 1}
    metrics = engine.core.metrics()
    assert metrics.finished_by_kind_total == counts
    assert sum(metrics.finished_total.values()) == sum(counts.values())
