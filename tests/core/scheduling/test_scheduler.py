"""Scheduler: what goes into a step, who waits, who is preempted."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeEngine, count_calls, make_request
from fakes import make_engine as make_any_engine
from msgspec.structs import replace
from quire.ipc.protocol.messages import FinishReason


def make_engine(num_blocks: int = 64, **options: Any) -> FakeEngine:
    return make_any_engine(num_blocks, **{"run_ahead": 1, **options})


def test_a_prompt_longer_than_the_budget_is_split():
    engine = make_engine(max_num_batched_tokens=32)
    engine.add(make_request("a", [1] * 70, max_tokens=2))
    assert [engine.compute() for _ in range(4)] == [{"a": 32}, {"a": 32}, {"a": 6}, {"a": 1}]
    assert engine.finals["a"].finish_reason is FinishReason.LENGTH


def test_without_chunked_prefill_a_prompt_goes_whole_or_waits():
    engine = make_engine(
        max_num_batched_tokens=64,
        max_model_len=64,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=4,
    )
    engine.add(make_request("a", [1] * 40, max_tokens=3))
    engine.add(make_request("b", [2] * 40, max_tokens=3))
    assert engine.compute() == {"a": 40}
    assert engine.compute() == {"a": 1, "b": 40}


def test_requests_share_a_step_up_to_the_budget_in_order_of_arrival():
    engine = make_engine(max_num_batched_tokens=32)
    for i, arrival in enumerate((3.0, 1.0, 2.0)):
        engine.add(make_request(f"r{i}", [i] * 14, arrival_time=arrival, max_tokens=4))
    assert engine.compute() == {"r1": 14, "r2": 14, "r0": 4}


def test_a_long_prompt_gets_no_more_than_the_threshold_beside_decodes():
    engine = make_engine(max_num_batched_tokens=64, long_prefill_token_threshold=10)
    engine.add(make_request("a", [1] * 4, max_tokens=20))
    engine.compute()
    engine.add(make_request("long", [2] * 35, max_tokens=2))
    engine.add(make_request("long too", [3] * 35, max_tokens=2))
    assert [engine.compute() for _ in range(3)] == [{"a": 1, "long": 10}] * 3
    # The last 5 tokens of the first one are short work; they leave 5 to the second one.
    assert engine.compute() == {"a": 1, "long": 5, "long too": 5}


def test_short_prompts_beside_decodes_are_bounded_by_the_budget_only():
    engine = make_engine(max_num_batched_tokens=64, long_prefill_token_threshold=10)
    engine.add(make_request("a", [1] * 4, max_tokens=20))
    engine.compute()
    for i in range(9):
        engine.add(make_request(f"s{i}", [2 + i] * 9, max_tokens=2))
    assert engine.compute() == {"a": 1, **{f"s{i}": 9 for i in range(7)}}


def test_the_threshold_is_a_quarter_of_the_budget_by_default_and_off_without_decodes():
    engine = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("long", [1] * 100, max_tokens=2))
    assert engine.compute() == {"long": 64}
    engine = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("a", [1] * 4, max_tokens=20))
    engine.compute()
    engine.add(make_request("long", [1] * 100, max_tokens=2))
    assert engine.compute() == {"a": 1, "long": 16}


def test_decodes_go_first_when_the_budget_is_short():
    engine = make_engine(max_num_batched_tokens=3, enable_prefix_caching=False)
    engine.add(make_request("a", [1], max_tokens=9))
    engine.add(make_request("b", [2], max_tokens=9))
    engine.compute()
    engine.add(make_request("c", [3] * 9, max_tokens=9, arrival_time=-1.0))
    assert engine.compute() == {"a": 1, "b": 1, "c": 1}
    assert engine.compute() == {"a": 1, "b": 1, "c": 1}


def test_rows_bound_the_running_requests():
    engine = make_engine(max_num_seqs=2)
    for i in range(3):
        engine.add(make_request(f"r{i}", [i], max_tokens=2))
    assert engine.compute() == {"r0": 1, "r1": 1}
    assert engine.compute() == {"r0": 1, "r1": 1}
    assert engine.compute() == {"r2": 1}


def test_a_request_that_does_not_fit_is_not_overtaken():
    engine = make_engine(8)
    engine.add(make_request("a", [1] * 16, max_tokens=40))
    engine.compute()
    engine.add(make_request("big", [2] * 48, max_tokens=8))
    engine.add(make_request("small", [3], max_tokens=2))
    assert engine.compute() == {"a": 1}
    engine.run()
    assert [new.request_id for step in engine.steps for new in step.new_requests] == ["a", "big", "small"]


def test_requests_of_one_step_share_a_prefix_that_is_computed_once():
    engine = make_engine(max_num_batched_tokens=2048)
    for i in range(4):
        engine.add(make_request(f"r{i}", [1] * 64 + [100 + i] * 5, max_tokens=2))
    assert engine.compute() == {"r0": 69, "r1": 5, "r2": 5, "r3": 5}
    engine.run()
    cached = {o.request_id: o.num_cached_tokens for o in engine.outputs if o.num_cached_tokens is not None}
    assert cached == {"r0": 0, "r1": 64, "r2": 64, "r3": 64}


def test_the_last_request_is_preempted_when_blocks_run_out_and_comes_back_first():
    engine = make_engine(6, enable_prefix_caching=False)
    engine.add(make_request("a", [1] * 15, max_tokens=26))
    engine.add(make_request("b", [2] * 15, max_tokens=26))
    engine.add(make_request("c", [3] * 7, max_tokens=2))
    seen = []
    while engine.core.num_unfinished:
        engine.turn()
        seen.append(engine.list_running())
        assert engine.core.check_integrity() == []
    assert ["a", "b"] in seen
    assert engine.core.counters.num_preemptions == 1
    started = [new.request_id for step in engine.steps for new in step.new_requests]
    assert started == ["a", "b", "b", "c"]
    assert engine.finals["a"].times is not None
    assert engine.finals["a"].times.num_preemptions == 0
    assert engine.finals["b"].times is not None
    assert engine.finals["b"].times.num_preemptions == 1


def test_a_preempted_request_takes_tokens_on_their_way_before_it_resumes():
    engine = make_engine(4, enable_prefix_caching=False, run_ahead=2)
    engine.add(make_request("a", [1] * 8, max_tokens=24))
    engine.add(make_request("b", [2] * 8, max_tokens=24))
    b = engine.requests["b"]
    while engine.core.counters.num_preemptions == 0:
        while engine.launch() is not None:
            pass
        if engine.core.counters.num_preemptions == 0:
            engine.finish_step()
    assert b.num_placeholders == 1
    num_known = b.num_output_tokens
    engine.finish_step()
    assert b.num_output_tokens == num_known + 1
    engine.run()
    resumed = [new for step in engine.steps for new in step.new_requests if new.request_id == "b"]
    assert len(resumed[1].output_token_ids) == 4 * (num_known + 1)


def test_a_resumed_request_finds_its_own_blocks_again():
    engine = make_engine(6)
    engine.add(make_request("a", [1] * 15, max_tokens=26))
    engine.add(make_request("b", [2] * 15, max_tokens=26))
    engine.run()
    resumed = [new for step in engine.steps for new in step.new_requests if new.request_id == "b"]
    assert len(resumed) == 2
    assert resumed[0].num_computed_tokens == 0
    assert engine.core.counters.prefix_cache_hits == resumed[1].num_computed_tokens


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["low", "high", "mid"]),
        ("priority", ["high", "mid", "low"]),
        ("fair", ["high", "mid", "low"]),  # of one tenant
    ],
)
def test_a_lower_priority_value_runs_first_but_under_fcfs(policy: str, order: list[str]):
    engine = make_engine(policy=policy, max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("mid", 0)):
        engine.add(make_request(name, [priority + 7], priority=priority, max_tokens=2))
    engine.run()
    assert list(engine.finals) == order


@pytest.mark.parametrize("lack", ["rows", "blocks"])
def test_an_urgent_request_displaces_a_worse_one_that_holds_what_it_needs(lack: str):
    engine = make_engine(
        8 if lack == "blocks" else 64,
        policy="priority",
        max_num_seqs=2 if lack == "rows" else 8,
        enable_prefix_caching=False,
    )
    engine.add(make_request("low", [1] * 24, priority=2, max_tokens=9))
    engine.add(make_request("lower", [2] * 24, priority=3, max_tokens=9))
    engine.compute()
    assert engine.list_running() == ["low", "lower"]
    engine.add(make_request("urgent", [3] * 24, priority=0, max_tokens=9))
    assert engine.compute() == {"low": 1, "urgent": 24}
    engine.run()
    assert engine.core.counters.num_preemptions == 1
    assert len(engine.tokens["lower"]) == 9


def test_an_equal_priority_displaces_nobody_and_neither_does_one_that_would_not_fit_anyway():
    engine = make_engine(8, policy="priority", enable_prefix_caching=False)
    engine.add(make_request("first", [1] * 30, priority=0, max_tokens=9))
    engine.add(make_request("low", [2] * 15, priority=2, max_tokens=9))
    engine.compute()
    assert engine.list_running() == ["first", "low"]
    engine.add(make_request("equal", [3] * 15, priority=2, arrival_time=-5.0, max_tokens=9))
    engine.add(make_request("huge", [4] * 55, priority=1, max_tokens=2))
    assert engine.compute() == {"first": 1, "low": 1}
    assert engine.core.counters.num_preemptions == 0


def test_no_step_is_scheduled_beyond_the_run_ahead_depth_or_a_request_limit():
    engine = make_engine(run_ahead=2)
    engine.add(make_request("a", [1] * 4, max_tokens=2))
    assert engine.launch_work() == {"a": 4}
    assert engine.launch_work() == {"a": 1}
    assert engine.launch_work() == {}
    engine.finish_step()
    assert engine.launch_work() == {}  # its second token is on the way and is its last
    engine.finish_step()
    assert len(engine.steps) == 2


def test_a_step_that_fails_leaves_nothing_of_its_own_to_be_found():
    engine = make_engine()
    engine.add(make_request("a", [1] * 32, max_tokens=2))
    engine.worker.fail_next = "out of memory"
    engine.compute()
    assert engine.compute() == {"a": 32}


def test_a_block_that_decoding_fills_in_a_failed_step_is_not_found():
    engine = make_engine(run_ahead=2)
    engine.add(make_request("a", [1] * 7, max_tokens=9))
    engine.launch()
    engine.launch()  # computes the eighth token, which completes the first block
    engine.finish_step()
    engine.worker.fail_next = "injected"
    engine.finish_step()
    assert engine.compute() == {"a": 8}


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_the_next_turn_of_a_conversation_finds_prompt_and_answer(run_ahead: int):
    engine = make_engine(run_ahead=run_ahead)
    engine.add(make_request("a", [1] * 13, max_tokens=20))
    engine.run()
    engine.add(make_request("b", [1] * 13 + engine.tokens["a"] + [5], max_tokens=2))
    engine.run()
    assert engine.core.counters.prefix_cache_hits == 32


def test_who_goes_on_from_a_request_finds_all_that_it_left_and_the_second_copies_its_last_block():
    engine = make_engine()
    engine.add(replace(make_request("a", [1] * 9, max_tokens=3), is_continued=True))
    engine.run()
    for name in ("b", "c"):
        request = make_request(name, [1] * 9, output=engine.tokens["a"], max_tokens=20)
        engine.add(replace(request, is_continued=True))
    assert engine.compute() == {"b": 1, "c": 1}
    [(_, source, destination)] = engine.steps[-1].block_copies
    left, copied = (engine.requests[name].blocks[0].ids[-1] for name in ("b", "c"))
    assert (left, copied) == (source, destination)
    engine.run()  # the worker looks at what each reads


def test_waiting_requests_cost_a_step_nothing():
    costs = []
    for num_waiting in (1, 1000):
        engine = make_engine(512, max_num_seqs=16)
        for i in range(16 + num_waiting):
            engine.add(make_request(f"r{i}", [i % 900] * 4, max_tokens=100))
        engine.compute()
        costs.append(count_calls(engine))
    assert costs[1] < costs[0] + 100  # a look at each of them would be a thousand


def test_a_decode_inside_its_block_does_not_touch_the_cache_manager(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    for i in range(8):
        engine.add(make_request(f"r{i}", [i] * 9, max_tokens=50))
    engine.compute()
    for name in ("grow", "index_full_blocks", "find_prefix", "allocate", "free"):
        monkeypatch.setattr(type(engine.scheduler.batch.manager), name, None)
    for _ in range(5):  # tokens 11 to 15; the 16th completes the second block
        assert engine.compute() == {f"r{i}": 1 for i in range(8)}
