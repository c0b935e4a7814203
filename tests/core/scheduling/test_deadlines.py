"""Timeouts and the bounded queue: who ends when, with what answer, and who is not touched."""

from __future__ import annotations

import msgspec
import pytest
from fakes import FakeEngine, make_engine, make_request, token_at
from quire.ipc.protocol.messages import ErrorCode, FinishReason
from quire.ipc.protocol.token_ids import encode_token_ids


def expire(engine: FakeEngine, seconds: float) -> None:
    """Let time pass, and let the core look at it as the busy loop does."""
    engine.clock.advance(seconds)
    engine.core.expire(engine.clock.now)
    engine.deliver()
    assert engine.core.check_integrity() == []


def test_a_request_whose_time_is_up_ends_with_abort_and_the_tokens_it_has():
    engine = make_engine(run_ahead=2)
    engine.add(make_request("r", [1, 2], max_tokens=90, timeout_s=3.5))
    for _ in range(3):
        engine.turn()  # a second each
    assert engine.core.num_in_flight == 1
    expire(engine, 0.4)
    assert engine.finals == {}
    expire(engine, 0.1)
    final = engine.finals["r"]
    assert (final.finish_reason, final.error, final.start) == (FinishReason.ABORT, None, 3)
    assert len(engine.tokens["r"]) == 3
    assert engine.core.stats().kv_blocks_used == 0


def test_a_request_that_has_not_begun_ends_with_queue_timeout_and_one_that_has_goes_on():
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("running", [1], max_tokens=9, queue_timeout_s=2.5))
    engine.turn()
    engine.add(make_request("waiting", [2], max_tokens=9, queue_timeout_s=2.5))
    expire(engine, 2.5)
    final = engine.finals["waiting"]
    assert (final.finish_reason, final.error_code) == (FinishReason.ERROR, ErrorCode.QUEUE_TIMEOUT)
    assert "queue_timeout_s=2.5" in (final.error or "")
    engine.run()
    assert len(engine.tokens["running"]) == 9


def test_a_preempted_request_and_a_resumed_one_have_begun():
    engine = make_engine(max_num_seqs=1)
    engine.add(make_request("r", [1], max_tokens=9, queue_timeout_s=1.0))
    engine.turn()
    engine.lose_worker()
    given = [token_at(encode_token_ids([2]), 0)]
    engine.add(make_request("resumed", [2], output=given, max_tokens=9, queue_timeout_s=1.0))
    assert engine.core.next_deadline() is None
    expire(engine, 100.0)
    engine.run()
    assert {final.finish_reason for final in engine.finals.values()} == {FinishReason.LENGTH}


def test_the_next_deadline_is_the_earliest_of_what_still_waits_for_it():
    engine = make_engine(max_num_seqs=1)
    assert engine.core.next_deadline() is None
    engine.add(make_request("a", [1], max_tokens=9, timeout_s=50.0, queue_timeout_s=5.0))
    engine.add(make_request("b", [2], max_tokens=9, timeout_s=20.0))
    began = engine.clock.now
    assert engine.core.next_deadline() == began + 5.0
    engine.turn()
    assert engine.core.next_deadline() == began + 20.0
    engine.core.abort_requests(b"client", ["b"])
    assert engine.core.next_deadline() == began + 50.0
    engine.core.abort_requests(b"client", ["a"])
    assert engine.core.next_deadline() is None


def test_a_wall_clock_that_jumps_ends_nothing():
    engine = make_engine()
    monotonic = 5.0
    engine.core._monotonic = lambda: monotonic
    engine.add(make_request("r", [1], max_tokens=9, timeout_s=3.0))
    engine.clock.advance(1e6)
    engine.core.expire(monotonic)
    assert engine.core.next_deadline() == 8.0
    engine.run()
    assert engine.finals["r"].finish_reason is FinishReason.LENGTH


def test_deadlines_of_ended_requests_do_not_stay_in_memory():
    engine = make_engine()
    for i in range(500):
        engine.add(make_request(f"r{i}", [i % 900 + 1], max_tokens=1, timeout_s=1e5, queue_timeout_s=1e5))
        engine.run()
    assert len(engine.core._deadlines._heap) <= 130


def test_a_full_queue_refuses_at_once_with_the_numbers():
    engine = make_engine(max_num_seqs=1, max_num_queued_reqs=2)
    engine.add(make_request("running", [1], max_tokens=9))
    engine.turn()
    for name in ("w1", "w2", "refused"):
        engine.add(make_request(name, [2], max_tokens=2))
    final = engine.finals["refused"]
    assert (final.finish_reason, final.error_code) == (FinishReason.ERROR, ErrorCode.OVERLOADED)
    assert "2 requests wait already" in (final.error or "")
    assert "max_num_queued_reqs=2" in (final.error or "")
    assert list(engine.finals) == ["refused"]
    engine.run()
    assert len(engine.finals) == 4
    assert engine.core.check_integrity() == []


def test_a_resumed_request_finds_no_queue_full():
    engine = make_engine(max_num_seqs=1, max_num_queued_reqs=1)
    engine.add(make_request("running", [1], max_tokens=9))
    engine.turn()
    engine.add(make_request("w1", [2], max_tokens=2))
    given = [token_at(encode_token_ids([3]), 0)]
    engine.add(make_request("resumed", [3], output=given, max_tokens=4))
    engine.add(msgspec.structs.replace(make_request("no token yet", [4], max_tokens=4), is_resumed=True))
    assert engine.finals == {}
    engine.run()


def test_requests_that_find_free_rows_do_not_fill_the_queue():
    engine = make_engine(max_num_seqs=4, max_num_queued_reqs=2)
    for i in range(7):
        engine.add(make_request(f"r{i}", [i + 1], max_tokens=9))
    assert list(engine.finals) == ["r6"]
    engine.turn()
    engine.add(make_request("late", [9], max_tokens=9))
    assert list(engine.finals) == ["r6", "late"]


def test_requests_that_a_lost_worker_has_interrupted_do_not_fill_the_queue():
    engine = make_engine(max_num_seqs=4, max_num_queued_reqs=2)
    for i in range(3):
        engine.add(make_request(f"r{i}", [i + 1], max_tokens=9))
    engine.turn()
    engine.lose_worker()
    for i in range(3, 7):
        engine.add(make_request(f"r{i}", [i + 1], max_tokens=9))
    assert list(engine.finals) == ["r6"]
    assert "2 requests wait already" in (engine.finals["r6"].error or "")


def test_a_queue_has_its_bound_also_while_a_poison_request_is_looked_for():
    engine = make_engine(max_num_seqs=4, max_num_queued_reqs=2)
    engine.worker.poisoned.add("r0")
    for i in range(4):
        engine.add(make_request(f"r{i}", [i + 1], max_tokens=9))
    engine.turn()
    for i in range(4, 40):
        engine.add(make_request(f"r{i}", [i + 1], max_tokens=9))
    refused = {name for name, final in engine.finals.items() if final.error_code is ErrorCode.OVERLOADED}
    assert 30 <= len(refused) <= 34  # those under test are in rows already
    engine.run()
    assert len(engine.finals) == 40


def test_under_fair_a_flood_does_not_keep_others_out_of_the_queue():
    engine = make_engine(max_num_seqs=1, max_num_queued_reqs=8, policy="fair")
    for i in range(40):
        engine.add(make_request(f"flood{i}", [i + 1], max_tokens=9), b"flood")
    assert engine.core.stats().num_waiting == 9
    for i in range(40):
        engine.add(make_request(f"light{i}", [i + 1], max_tokens=9), b"light")
    assert engine.core.stats().num_waiting == 9 + 4
    assert "light3" not in engine.finals
    for i in range(40):
        engine.add(make_request(f"{i}", [i + 1], max_tokens=9, tenant=str(i)), b"many")
    assert engine.core.stats().num_waiting == 2 * 8 + 1  # one of them is to begin in the next step
    engine.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_under_other_policies_a_full_queue_is_full_for_all(policy: str):
    engine = make_engine(max_num_seqs=1, max_num_queued_reqs=2, policy=policy)
    for i in range(5):
        engine.add(make_request(f"flood{i}", [i + 1], max_tokens=9), b"flood")
    engine.add(make_request("light", [7], max_tokens=9), b"light")
    assert engine.finals["light"].error_code is ErrorCode.OVERLOADED
