"""Clients of other machines: what the core makes of what they say."""

from __future__ import annotations

from fakes import FakeEngine, make_config, make_request
from msgspec.structs import replace
from quire.core.clients.remote_clients import adapt_request
from quire.ipc.config import SchedulerConfig


def test_a_resumed_request_keeps_its_place_by_its_age_and_not_by_a_clock_that_is_slow() -> None:
    engine = FakeEngine(make_config(scheduler=SchedulerConfig(max_num_seqs=1)), 64)
    engine.clock.now = 1000.0
    engine.add(make_request("first", [1], arrival_time=700.0, max_tokens=2))
    slow = make_request("slow", [2], arrival_time=5.0, max_tokens=2)
    engine.add(adapt_request(replace(slow, is_resumed=True, age_s=200.0)))
    engine.add(make_request("later", [3], arrival_time=900.0, max_tokens=2))
    engine.add(adapt_request(make_request("new", [4], arrival_time=5.0, max_tokens=2)))
    engine.run()
    assert list(engine.finals) == ["first", "slow", "later", "new"]
