"""What a look into the engine shows, and that it costs little however much waits."""

from __future__ import annotations

import cProfile

import pytest
from fakes import FakeEngine, make_config, make_request
from quire.core.kv.block_pool import BlockPool
from quire.core.stats.engine_facts import call_utility
from quire.core.stats.stats_collector import (
    MAX_BLOCK_CELLS,
    MAX_REQUEST_VIEWS,
    MIN_WAITING_VIEWS,
    CoreProcessInfo,
)
from quire.ipc.protocol.engine_views import ClientView, EngineSnapshot
from quire.ipc.protocol.messages import UtilityCall, UtilityMethod
from quire.ipc.spec.config import SchedulerConfig


def make_engine(num_blocks: int = 64, max_num_seqs: int = 256, **config: int) -> FakeEngine:
    return FakeEngine(make_config(scheduler=SchedulerConfig(max_num_seqs=max_num_seqs), **config), num_blocks)


def make_client(pid: int) -> ClientView:
    return ClientView(kind="llm", pid=pid, weight=1.0, num_unsent=0, connected_s=3.0)


def attach(*identities: bytes) -> dict[bytes, ClientView]:
    return {identity: make_client(40 + place) for place, identity in enumerate(identities)}


def look(engine: FakeEngine, *clients: bytes) -> EngineSnapshot:
    return engine.core.snapshot(
        CoreProcessInfo("epoch", engine.clock.now - 60.0, attach(*clients or (b"client",)))
    )


def test_a_request_is_shown_with_what_it_has_and_what_it_may_get():
    engine = make_engine()
    engine.add(make_request("a", list(range(12)), max_tokens=20))
    engine.clock.advance(1.5)
    engine.turn()
    (view,) = look(engine).requests
    assert (view.request_id, view.client, view.state, view.waits_for) == ("a", "llm-40", "running", "")
    assert (view.num_prompt_tokens, view.num_output_tokens, view.max_total_tokens) == (12, 1, 32)
    assert (view.num_blocks, view.age_s) == (2, 2.5)  # a turn of the fake takes 1 s
    engine.lose_worker()
    (view,) = look(engine).requests
    assert (view.state, view.num_preemptions) == ("preempted", 1)
    engine.run()
    assert look(engine).requests == []


def test_what_is_not_plain_is_shown_as_such():
    engine = make_engine()
    engine.add(make_request("plain", [1], max_tokens=9))
    engine.add(make_request("grammar", [1], max_tokens=9, grammar="start: /a/"))
    engine.add(make_request("beams", [1], max_tokens=9, purpose="beam_search"))
    engine.add(make_request("thinking", [1], max_tokens=9, purpose="thinking"))
    engine.add(make_request("tools", [1], max_tokens=9, grammar="start: /a/", purpose="tools"))
    kinds = [view.kind for view in look(engine).requests]
    assert kinds == ["", "grammar", "beam_search", "thinking", "tools"]


def test_the_waiting_are_shown_in_the_order_in_which_they_will_run_and_say_what_for():
    engine = make_engine(max_num_seqs=1)
    for number in (0, 3, 1, 2):
        engine.add(make_request(f"r{number}", [1, 2], max_tokens=9, arrival_time=float(number)))
    engine.turn()
    views = look(engine).requests
    assert [view.request_id for view in views] == ["r0", "r1", "r2", "r3"]
    assert [view.state for view in views] == ["running", "waiting", "waiting", "waiting"]
    assert "max_num_seqs=1" in views[1].waits_for


def test_a_request_that_lacks_blocks_says_how_many():
    engine = make_engine(num_blocks=17)
    engine.add(make_request("big", list(range(100)), max_tokens=9))
    engine.turn()
    engine.add(make_request("next", list(range(50, 100)), max_tokens=9))
    engine.turn()
    waiting = look(engine).requests[1]
    assert waiting.request_id == "next"
    assert waiting.waits_for != ""
    assert "blocks" in waiting.waits_for


def test_requests_that_wait_for_the_end_of_a_search_are_counted_and_shown_as_such():
    engine = make_engine()
    for number in range(4):
        engine.add(make_request(f"r{number}", [1, 2], max_tokens=9, arrival_time=float(number)))
    engine.worker.fail_next = "a hiccup"
    engine.turn()
    snapshot = look(engine)
    assert (snapshot.stats.num_running, snapshot.stats.num_waiting) == (0, 4)
    assert snapshot.num_hidden_requests == 0
    parked = [view.request_id for view in snapshot.requests if "makes steps fail" in view.waits_for]
    assert parked == ["r2", "r3"]


def test_more_than_can_be_shown_is_counted_and_the_waiting_keep_a_place():
    engine = make_engine(num_blocks=2000)
    for number in range(600):
        engine.add(make_request(f"r{number}", [1, 2], max_tokens=9, arrival_time=float(number)))
    engine.turn()
    snapshot = look(engine)
    states = [view.state for view in snapshot.requests]
    assert len(states) == MAX_REQUEST_VIEWS
    assert states.count("waiting") == MIN_WAITING_VIEWS
    assert snapshot.num_hidden_requests == 600 - MAX_REQUEST_VIEWS
    waiting = [view.request_id for view in snapshot.requests if view.state == "waiting"]
    assert waiting == [f"r{256 + place}" for place in range(MIN_WAITING_VIEWS)]


def test_clients_are_shown_with_their_own_requests_and_tokens():
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("a", [1, 2], max_tokens=5, arrival_time=1.0), b"first")
    engine.add(make_request("b", [1, 2], max_tokens=5, arrival_time=2.0), b"second")
    engine.turn()
    first, second, idle = look(engine, b"first", b"second", b"idle").clients
    one_process = dict.fromkeys((b"first", b"second"), make_client(7))
    names = [one.name for one in engine.core.snapshot(CoreProcessInfo("", 0.0, one_process)).clients]
    assert names == ["llm-7", "llm-7.2"]
    assert (first.num_running, first.num_waiting, first.tokens_served_total) == (1, 0, 1)
    assert (second.num_running, second.num_waiting, second.tokens_served_total) == (0, 1, 0)
    assert (idle.name, idle.num_running, idle.num_waiting, idle.connected_s) == ("llm-42", 0, 0, 3.0)
    engine.run()
    first, second, _ = look(engine, b"first", b"second", b"idle").clients
    assert (first.tokens_served_total, second.tokens_served_total) == (5, 5)
    assert look(engine, b"first").stats.num_clients == 1


@pytest.mark.parametrize("num_blocks", [4, 511, 512, 513, 10_007])
def test_the_block_map_tells_of_every_block_in_a_bounded_number_of_cells(num_blocks: int):
    pool = BlockPool(num_blocks)
    taken = pool.take(num_blocks)
    for block in taken[1:3]:
        pool.register(block, b"%d" % block)
    pool.release(taken[num_blocks // 2 :])
    cells, length = pool.map_cells(MAX_BLOCK_CELLS)
    num_cells = len(cells) // 2
    assert num_cells <= MAX_BLOCK_CELLS
    assert num_cells == -(-num_blocks // length)
    sizes = [min(length, num_blocks - length * cell) for cell in range(num_cells)]
    num_used = sum(size * cells[2 * cell] / 255 for cell, size in enumerate(sizes))
    assert num_used == pytest.approx(num_blocks // 2, abs=max(sizes) / 255 * num_cells)
    if length == 1:
        shares = [tuple(cells[2 * block : 2 * block + 2]) for block in (taken[0], *taken[1:3], taken[-1])]
        is_used = 255 * (num_blocks > 4)
        assert shares == [(255, 0), (255, 255), (is_used, 255), (0, 0)]


def test_snapshot_and_metrics_are_answers_to_utility_calls_and_count_who_is_attached():
    engine = make_engine()
    engine.add(make_request("a", [1, 2], max_tokens=2))
    engine.run()
    process = CoreProcessInfo("epoch", engine.clock.now - 60.0, attach(b"client", b"other"))
    shown = call_utility(engine.core, UtilityCall(1, UtilityMethod.SNAPSHOT), process)
    counted = call_utility(engine.core, UtilityCall(2, UtilityMethod.METRICS), process)
    assert shown.snapshot is not None
    assert (shown.call_id, shown.snapshot.epoch, shown.snapshot.uptime_s) == (1, "epoch", 60.0)
    assert counted.metrics is not None
    assert (counted.call_id, counted.metrics.finished_total["length"]) == (2, 1)
    assert shown.snapshot.stats == counted.metrics.stats
    assert counted.metrics.stats.num_clients == 2


def count_calls_of_a_look(num_waiting: int) -> int:
    """Functions that one look calls."""
    engine = FakeEngine(make_config(), 4000, verify=False)
    for number in range(256 + num_waiting):
        engine.add(make_request(f"r{number}", [1, 2], max_tokens=99, arrival_time=float(number)))
    engine.turn()
    assert engine.core.stats().num_waiting == num_waiting
    process = CoreProcessInfo("epoch", 0.0, attach(b"client"))
    engine.core.snapshot(process)
    with cProfile.Profile() as profile:
        engine.core.snapshot(process)
    return sum(entry.callcount for entry in profile.getstats())


def test_a_look_costs_the_same_however_much_waits():
    assert count_calls_of_a_look(2000) < count_calls_of_a_look(300) + 100
