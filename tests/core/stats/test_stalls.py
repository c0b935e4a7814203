"""Stalls: a request that gets no token is named while the device is free, and never while it is busy."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.scheduling.scheduler import Scheduler
from quire.core.stats.stalls import DeviceFreeTime
from quire.ipc.protocol.engine_views import StalledRequest
from quire.ipc.spec.config import SchedulerConfig


def find_stall(engine: FakeEngine) -> StalledRequest | None:
    return engine.core.stats().stall


def test_free_time_is_counted_from_any_moment() -> None:
    free = DeviceFreeTime()
    assert free.is_empty
    for start in (10.0, 20.0, 30.0):
        free.note_free(start)
        free.note_free(start + 1.0)  # it still is
        free.note_step(start + 2.0)
        free.note_step(start + 3.0)
    free.note_free(40.0)
    assert not free.is_empty
    now = 45.0
    for since, expected in ((0.0, 11.0), (11.0, 10.0), (15.0, 9.0), (30.5, 6.5), (41.0, 4.0), (45.0, 0.0)):
        assert free.measure(since, now) == expected, since


def test_a_request_that_is_never_scheduled_is_named_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(make_config(), 64)
    engine.add(make_request("first", [1, 2], max_tokens=9))
    engine.turn()
    engine.turn()
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "schedule", lambda _self: None)
        engine.turn()
        engine.turn()
        engine.clock.advance(40.0)
        stall = find_stall(engine)
        assert stall is not None
        assert stall.request_id == "first"
        assert stall.stage.startswith("decoding, ")
        assert stall.free_s >= 40.0
        engine.add(make_request("second", [1, 2], max_tokens=9))
        engine.clock.advance(1.0)
        stall = find_stall(engine)
        assert stall is not None
        assert stall.request_id == "first"  # the worst
    engine.run()
    assert find_stall(engine) is None  # it has ended
    engine.add(make_request("third", [1, 2], max_tokens=9))
    assert find_stall(engine) is None  # what was before it came is not its own


def test_waiting_behind_others_and_long_steps_are_no_stalls() -> None:
    engine = FakeEngine(make_config(scheduler=SchedulerConfig(max_num_seqs=1)), 64)
    engine.add(make_request("runs", [1, 2], max_tokens=50))
    engine.add(make_request("waits", [1, 2], max_tokens=9))
    for _ in range(20):
        engine.turn()
        engine.clock.advance(100.0)
        assert find_stall(engine) is None
    engine.run()
    assert find_stall(engine) is None


def test_a_lost_worker_is_no_stall_while_another_starts() -> None:
    engine = FakeEngine(make_config(), 64)
    engine.add(make_request("a", [1, 2], max_tokens=9))
    engine.turn()
    engine.lose_worker()
    engine.clock.advance(100.0)
    assert find_stall(engine) is None
