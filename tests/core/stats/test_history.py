"""What charts show: a point for each period with work, and none of an idle engine."""

from __future__ import annotations

import msgspec
import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.stats.engine_facts import call_utility
from quire.core.stats.history import NUM_POINTS, PERIOD_S
from quire.core.stats.stats_collector import CoreProcessInfo
from quire.ipc.protocol.engine_views import EngineHistory
from quire.ipc.protocol.messages import UtilityCall, UtilityMethod, UtilityResult
from quire.ipc.spec.config import SchedulerConfig


def make_engine(max_num_seqs: int = 8) -> FakeEngine:
    engine = FakeEngine(make_config(scheduler=SchedulerConfig(max_num_seqs=max_num_seqs)), 64)
    engine.clock.advance(-engine.clock.now % PERIOD_S)  # a period begins
    return engine


def look(engine: FakeEngine) -> EngineHistory:
    """As a client gets it."""
    result = call_utility(engine.core, UtilityCall(1, UtilityMethod.HISTORY), CoreProcessInfo("epoch", 0.0))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=UtilityResult)
    assert decoded.history is not None
    return decoded.history


def test_a_period_has_what_was_counted_in_it_and_the_most_that_ran_and_waited():
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(make_request(name, [1, 2, 3], max_tokens=3))
    engine.run()  # a turn takes a second
    began = engine.clock.now
    first, *others = look(engine).points
    assert first.at + PERIOD_S * (1 + len(others)) >= began
    points = [first, *others]
    assert sum(point.prompt_tokens for point in points) == 9
    assert sum(point.generation_tokens for point in points) == 9
    assert sum(point.num_first_tokens for point in points) == 3
    assert sum(point.num_gaps for point in points) == 6
    assert sum(point.gap_s for point in points) == pytest.approx(6.0)
    assert (first.num_running, first.num_waiting) == (2, 1)
    assert first.kv_blocks_used == 2
    assert look(engine).kv_blocks_total == 64


def test_work_belongs_to_its_own_period_however_long_the_engine_was_idle_since():
    engine = make_engine()
    engine.add(make_request("a", [1, 2], max_tokens=2))
    engine.run()
    began = look(engine).points[0].at
    engine.clock.advance(20 * PERIOD_S)
    idle = look(engine)
    assert [point.generation_tokens for point in idle.points] == [2]
    engine.add(make_request("b", [1, 2], max_tokens=1))
    engine.run()
    points = look(engine).points
    assert [point.generation_tokens for point in points] == [2, 1]
    assert points[1].at - began == 20 * PERIOD_S
    assert points[1].num_waiting == 0  # it ran at once


def test_no_more_is_kept_than_is_shown():
    engine = make_engine()
    for number in range(NUM_POINTS + 20):
        engine.add(make_request(f"r{number}", [1, 2], max_tokens=1))
        engine.run()
        engine.clock.advance(PERIOD_S)
    points = look(engine).points
    assert len(points) == NUM_POINTS
    assert engine.clock.now - points[-1].at < 2 * PERIOD_S + 1
