"""With several stages requests take turns, so that each stage has a step of its own to compute."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from fakes import FakeEngine, make_request
from fakes import make_engine as make_any_engine


def make_engine(num_stages: int, **options: int) -> FakeEngine:
    return make_any_engine(256, num_stages=num_stages, **{"max_num_batched_tokens": 64, **options})


def fill(engine: FakeEngine) -> int:
    """Launch all steps that may be in flight; how many are."""
    while engine.launch() is not None:
        pass
    return engine.core.num_in_flight


def decodes_of_newest(engine: FakeEngine) -> list[str]:
    return [request.request_id for request in engine.newest_step.sampled]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("count", [4, 7, 12])
def test_every_stage_has_another_group_of_requests_of_about_equal_size(num_stages: int, count: int) -> None:
    engine = make_engine(num_stages)
    for i in range(count):
        engine.add(make_request(f"r{i}", [i + 1] * 5, max_tokens=60))
    groups: list[list[str]] = []
    while len(groups) < 60:
        if engine.launch() is not None:
            groups.append(decodes_of_newest(engine))
        else:
            engine.finish_step()
    steady = groups[3 * num_stages :]
    for start in range(len(steady) - num_stages):
        cycle = steady[start : start + num_stages]
        assert sorted(chain.from_iterable(cycle)) == sorted(f"r{i}" for i in range(count)), "each once"
        assert max(map(len, cycle)) - min(map(len, cycle)) <= 1
        assert steady[start + num_stages] == cycle[0]
    engine.run()
    assert len(engine.finals) == count


def test_as_many_steps_are_in_flight_as_there_are_stages_and_one() -> None:
    for num_stages in (1, 2, 5):
        engine = make_engine(num_stages)
        for i in range(num_stages):
            engine.add(make_request(f"r{i}", [i + 1] * 5, max_tokens=60))
        fill(engine)
        engine.finish_step()
        assert fill(engine) == num_stages + 1
        assert engine.core.check_integrity() == []


@pytest.mark.parametrize(("run_ahead", "most"), [(1, 1), (2, 2)])
def test_a_request_alone_runs_as_far_ahead_as_with_one_stage(run_ahead: int, most: int) -> None:
    engine = make_engine(3, run_ahead=run_ahead)
    engine.add(make_request("alone", [1] * 5, max_tokens=9))
    for _ in range(7):
        assert fill(engine) == most
        engine.finish_step()
    engine.run()
    assert len(engine.tokens["alone"]) == 9


def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    engine = make_engine(2, max_num_batched_tokens=16)
    engine.add(make_request("long", [1] * 60, max_tokens=2))
    assert fill(engine) == 3
    assert [step.num_tokens for step in engine.steps] == [[16]] * 3


def test_a_group_that_grows_larger_than_the_others_shares_its_requests_out() -> None:
    engine = make_engine(2)
    engine.add(make_request("first", [1] * 5, max_tokens=60))
    fill(engine)
    for i in range(5):
        engine.add(make_request(f"r{i}", [i + 2] * 5, max_tokens=60))
    for _ in range(8):
        fill(engine)
        engine.finish_step()
    sizes = Counter(len(step.sampled) for step in engine.scheduler.in_flight)
    assert set(sizes) == {3}
    engine.run()
