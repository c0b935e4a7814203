"""A profile notes each step once, between its start and its end, within a bound."""

from __future__ import annotations

from fakes import FakeEngine, make_config, make_request
from quire.core.stats.engine_facts import call_utility
from quire.core.stats.stats_collector import CoreProcessInfo
from quire.core.stats.step_recorder import StepRecorder
from quire.ipc.protocol.engine_views import StepTrace
from quire.ipc.protocol.messages import UtilityCall, UtilityMethod, UtilityResult


def ask(engine: FakeEngine, method: UtilityMethod) -> UtilityResult:
    return call_utility(engine.core, UtilityCall(1, method), CoreProcessInfo("epoch", 0.0))


def stop(engine: FakeEngine) -> StepTrace:
    trace = ask(engine, UtilityMethod.STOP_PROFILE).trace
    assert trace is not None
    return trace


def run_request(engine: FakeEngine, name: str, num_tokens: int) -> None:
    engine.add(make_request(name, [1, 2, 3], max_tokens=num_tokens))
    engine.run()


def test_a_profile_has_the_steps_between_its_start_and_its_end():
    engine = FakeEngine(make_config(), 64)
    run_request(engine, "before", 5)
    assert ask(engine, UtilityMethod.START_PROFILE).error is None
    run_request(engine, "during", 4)
    steps = stop(engine).steps
    run_request(engine, "after", 5)
    assert [(step.num_tokens, step.num_rows, step.num_sampled) for step in steps][:4] == [
        (3, 1, 1),
        *[(1, 1, 1)] * 3,
    ]
    assert [step.step_id for step in steps] == sorted({step.step_id for step in steps})
    assert all(step.num_running == 1 and step.num_waiting == 0 for step in steps)
    for step in steps:
        times = [step.schedule_at, step.submitted_at, step.answered_at, step.updated_at]
        assert times == sorted(times)


def test_one_profile_is_taken_at_a_time():
    engine = FakeEngine(make_config(), 64)
    assert ask(engine, UtilityMethod.STOP_PROFILE).error
    ask(engine, UtilityMethod.START_PROFILE)
    assert "already" in (ask(engine, UtilityMethod.START_PROFILE).error or "")
    assert stop(engine) == StepTrace([])
    assert ask(engine, UtilityMethod.STOP_PROFILE).error


def test_steps_beyond_the_limit_are_counted_and_lost_ones_are_left_out():
    engine = FakeEngine(make_config(), 64)
    engine.core.recorder = StepRecorder(max_steps=3)
    engine.add(make_request("a", [1, 2, 3], max_tokens=6))
    engine.launch()
    engine.lose_worker()
    engine.run()
    trace = stop(engine)
    assert [step.num_tokens for step in trace.steps] == [3, 1, 1]
    assert trace.num_dropped >= 3
