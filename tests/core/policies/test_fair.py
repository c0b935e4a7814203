"""The fair policy: what a flood costs others, shares by weight, and who is preempted for whom."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from fakes import FakeEngine, count_calls, make_request
from fakes import make_engine as make_any_engine
from quire.core.policies.fair import FairPolicy
from quire.core.policies.fair_accounts import Account, account_of, record_of
from quire.core.scheduling.tenant import ClientShare
from quire.ipc.protocol.messages import FinishReason


def make_engine(num_blocks: int = 64, **options: Any) -> FakeEngine:
    return make_any_engine(num_blocks, **{"run_ahead": 1, "policy": "fair", **options})


def policy_of(engine: FakeEngine) -> FairPolicy:
    policy = engine.scheduler.policy
    assert isinstance(policy, FairPolicy)
    return policy


def account(engine: FakeEngine, request_id: str) -> Account:
    return account_of(engine.requests[request_id])


def flood(engine: FakeEngine, client: bytes, count: int, prompt_len: int, max_tokens: int) -> None:
    """Requests that share no prefix."""
    for i in range(count):
        prompt = [hash((client, i, place)) % 997 for place in range(prompt_len)]
        engine.add(make_request(f"{client.decode()}{i}", prompt, max_tokens=max_tokens), client)


def measure_first_tokens(engine: FakeEngine, num_requests: int, every: int) -> list[int]:
    """Turns from adding to the first token of short requests of one client, one each `every` turns."""
    turns: list[int] = []
    for i in range(num_requests):
        name = f"light{i}"
        engine.add(make_request(name, [i + 1, 7, 9] * 10, max_tokens=16), b"light")
        for turn in range(every):
            assert engine.turn() or turn > 0
            if engine.tokens[name] and len(turns) == i:
                turns.append(turn + 1)
        assert name in engine.finals
    return turns


def make_flooded(num_blocks: int, run_ahead: int, **scheduler: Any) -> FakeEngine:
    engine = make_engine(
        num_blocks,
        max_model_len=1024,
        verify=False,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        run_ahead=run_ahead,
        **scheduler,
    )
    flood(engine, b"flood", 260, 512, 256)
    for _ in range(60):
        engine.turn()
    return engine


@pytest.mark.parametrize(
    ("run_ahead", "num_blocks"), [(1, 1200), (2, 32 * 97)], ids=["blocks are short", "rows are short"]
)
def test_a_flood_at_most_doubles_the_time_to_first_token_of_others(num_blocks: int, run_ahead: int):
    alone = measure_first_tokens(
        make_engine(num_blocks, max_num_seqs=32, max_num_batched_tokens=1024, run_ahead=run_ahead), 12, 40
    )
    engine = make_flooded(num_blocks, run_ahead)
    assert engine.core.stats().num_waiting > 200
    flooded = measure_first_tokens(engine, 12, 40)
    assert statistics.median(flooded) <= 2 * statistics.median(alone)
    assert max(flooded) <= 3 * max(alone)
    assert engine.core.check_integrity() == []


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(400, 16), (60, 16)])
def test_tenants_under_saturation_get_tokens_by_weight(num_blocks: int, max_num_seqs: int):
    engine = make_engine(
        num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=128, enable_prefix_caching=False
    )
    engine.core.set_client(b"one", ClientShare(1.0))
    engine.core.set_client(b"three", ClientShare(3.0))
    flood(engine, b"one", 250, 24, 24)
    for _ in range(20):
        engine.turn()
    flood(engine, b"three", 250, 24, 24)
    served = {b"one": 0, b"three": 0}
    before = {name: account(engine, f"{name.decode()}249").counter for name in served}
    for _ in range(300):
        engine.turn()
    assert engine.core.stats().num_waiting > 100
    for name in served:
        tenant = account(engine, f"{name.decode()}249")
        served[name] = round((tenant.counter - before[name]) * tenant.weight)
    assert served[b"three"] / served[b"one"] == pytest.approx(3.0, rel=0.04)


def test_long_prompts_of_one_tenant_do_not_take_a_step_from_the_prompt_of_another():
    engine = make_engine(512, max_model_len=512, max_num_batched_tokens=64)
    flood(engine, b"long", 3, 400, 8)
    engine.compute()
    engine.compute()
    engine.add(make_request("short", [5] * 20, max_tokens=4), b"light")
    work = engine.compute()
    assert work == {"short": 20, "long0": 44}
    assert engine.tokens["short"] != []


def test_prompts_of_two_tenants_take_turns():
    engine = make_engine(512, max_model_len=512, max_num_batched_tokens=64)
    flood(engine, b"a", 2, 300, 8)
    flood(engine, b"b", 2, 300, 8)
    given = {b"a": 0, b"b": 0}
    for _ in range(8):
        for request_id, count in engine.compute().items():
            given[request_id[:1].encode()] += count
    assert given == {b"a": 256, b"b": 256}


def test_a_newcomer_takes_the_row_of_the_most_recent_request_of_who_holds_most():
    engine = make_engine(max_num_seqs=4)
    flood(engine, b"a", 6, 8, 60)
    engine.compute()
    engine.add(make_request("new", [1] * 8, max_tokens=9), b"b")
    assert engine.compute() == {"new": 8}
    assert engine.compute() == {"a0": 1, "a1": 1, "a2": 1, "new": 1}
    assert engine.requests["a3"].num_preemptions == 1
    assert engine.list_running(b"b") == ["new"]
    engine.run()
    assert len(engine.tokens["a3"]) == 60
    assert engine.core.counters.num_preemptions == 1


def test_decodes_that_were_left_out_fit_into_the_steps_that_follow():
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=4, long_prefill_token_threshold=4)
    flood(engine, b"a", 6, 4, 30)
    while not engine.tokens["a3"]:
        engine.compute()
    for i in range(3):
        engine.add(make_request(f"new{i}", [i + 1] * 4, max_tokens=9), b"b")
    while len(engine.finals) < 9:
        assert sum(engine.compute().values()) <= 4


def test_newcomers_of_several_tenants_begin_in_one_step():
    engine = make_engine(max_num_seqs=8)
    flood(engine, b"a", 12, 8, 60)
    engine.compute()
    for client in (b"b", b"c", b"d"):
        flood(engine, client, 3, 8, 9)
    for num_of_a in (0, 5):
        work = engine.compute()
        assert [sum(name[0] == client for name in work) for client in "abcd"] == [num_of_a, 1, 1, 1]


def test_more_requests_of_a_newcomer_begin_as_the_others_are_served_as_much():
    engine = make_engine(max_num_seqs=8)
    flood(engine, b"a", 12, 8, 60)
    engine.compute()
    flood(engine, b"b", 6, 8, 60)
    counts: list[int] = []
    for _ in range(16):
        engine.compute()
        counts.append(len(engine.list_running(b"b")))
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5])
def test_nobody_is_preempted_who_would_have_less_than_the_newcomer(num_seqs: int):
    engine = make_engine(max_num_seqs=num_seqs)
    for client in b"abcde"[:num_seqs]:
        flood(engine, bytes([client]), 3, 8, 40)
    engine.compute()
    for _ in range(200):
        if not engine.turn():
            break
    engine.run()
    assert engine.core.counters.num_preemptions <= num_seqs


def test_a_newcomer_of_more_weight_takes_more_rows():
    engine = make_engine(max_num_seqs=8)
    engine.core.set_client(b"b", ClientShare(3.0))
    flood(engine, b"a", 12, 8, 60)
    engine.compute()
    flood(engine, b"b", 12, 8, 60)
    for _ in range(12):
        engine.compute()
    assert len(engine.list_running(b"b")) == 6


def test_a_newcomer_that_lacks_blocks_takes_them_from_who_holds_most():
    engine = make_engine(24, enable_prefix_caching=False, max_num_seqs=16)
    flood(engine, b"a", 8, 30, 30)
    for _ in range(4):
        engine.compute()
    stats = engine.core.stats()
    assert stats.kv_blocks_total - stats.kv_blocks_used < 8
    engine.add(make_request("new", [1] * 30, max_tokens=20), b"b")
    assert engine.compute()["new"] == 30
    assert engine.core.check_integrity() == []
    engine.run()


def test_nobody_is_preempted_for_a_newcomer_that_would_not_fit_anyway():
    engine = make_engine(16, enable_prefix_caching=False, max_num_seqs=16)
    flood(engine, b"a", 2, 40, 30)
    engine.compute()
    engine.add(make_request("huge", [1] * 100, max_tokens=20), b"b")
    assert engine.compute() == {"a0": 1, "a1": 1}
    assert engine.core.counters.num_preemptions == 0
    engine.run()


def test_blocks_that_decodes_lack_come_from_the_tenant_that_holds_most():
    engine = make_engine(12, enable_prefix_caching=False, max_num_seqs=16)
    flood(engine, b"a", 3, 15, 40)
    engine.compute()
    engine.add(make_request("last", [1] * 8, max_tokens=40), b"b")  # in order the one to preempt
    while engine.core.counters.num_preemptions == 0:
        engine.compute()
    assert engine.list_running(b"b") == ["last"]
    assert engine.requests["a2"].num_preemptions == 1
    engine.run()
    assert all(final.finish_reason is FinishReason.LENGTH for final in engine.finals.values())


def test_clients_that_name_one_tenant_share_its_part():
    engine = make_engine(max_num_seqs=4)
    for client in (b"x", b"y", b"z"):
        for i in range(4):
            name = f"{client.decode()}{i}"
            engine.add(make_request(name, [i + 1] * 8, max_tokens=30, tenant="flood"), client)
    engine.compute()
    for i in range(4):
        engine.add(make_request(f"w{i}", [i + 1] * 8, max_tokens=30, tenant="light"), b"x")
    for _ in range(12):
        engine.compute()
    names = [live_request.tenant.name for live_request in engine.scheduler.running]
    assert sorted(names, key=str) == ["flood", "flood", "light", "light"]


def test_what_is_computed_again_is_not_charged_again():
    engine = make_engine(max_num_seqs=2, enable_prefix_caching=False)
    flood(engine, b"a", 2, 20, 10)
    for _ in range(3):
        engine.compute()
    tenant = account(engine, "a0")
    served = tenant.counter
    engine.lose_worker()
    engine.compute()
    assert engine.core.counters.num_preemptions == 2
    assert served == 2 * 22
    assert tenant.counter == served + 2  # the token that each was about to compute
    engine.run()


def test_a_tenant_that_comes_back_has_not_lost_what_it_was_served_beyond_others():
    engine = make_engine(512, max_num_seqs=2, max_num_batched_tokens=64)
    flood(engine, b"slow", 4, 4, 60)
    engine.compute()
    engine.add(make_request("greedy", [1] * 100, max_tokens=2), b"greedy")
    while "greedy" not in engine.finals:
        engine.compute()
    engine.add(make_request("again", [2] * 100, max_tokens=2), b"greedy")
    engine.compute()
    assert engine.list_running(b"greedy") == []
    engine.run()


def test_a_request_that_does_not_fit_does_not_hold_up_other_tenants():
    engine = make_engine(20, enable_prefix_caching=False, max_num_seqs=8)
    flood(engine, b"big", 3, 80, 40)
    engine.compute()
    for i in range(4):  # more than the flood's tokens meanwhile, and there is room
        engine.add(make_request(f"small{i}", [i + 1] * 16, max_tokens=3), b"light")
        assert engine.compute() == {"big0": 1, f"small{i}": 16}
        while f"small{i}" not in engine.finals:
            engine.compute()
    assert record_of(engine.requests["big1"]).num_overtaken > 0
    engine.run()


def test_a_request_that_does_not_fit_is_not_passed_for_ever():
    engine = make_engine(22, enable_prefix_caching=False, max_num_seqs=4)
    engine.add(make_request("holder", [1] * 60, max_tokens=60), b"holder")
    engine.compute()
    engine.add(make_request("big", [2] * 110, max_tokens=9), b"big")
    big = engine.requests["big"]
    for number in range(50):
        engine.add(make_request(f"small{number}", [number] * 16, max_tokens=2), b"light")
        engine.compute()
    assert record_of(big).num_overtaken == 4
    assert "small3" in engine.finals
    assert "small20" not in engine.finals
    engine.run()
    assert all(final.finish_reason is FinishReason.LENGTH for final in engine.finals.values())


def test_nobody_who_was_served_less_is_preempted():
    engine = make_engine(64, max_num_seqs=3, max_num_batched_tokens=64)
    engine.add(make_request("greedy", [1] * 100, max_tokens=2), b"greedy")
    flood(engine, b"slow", 1, 4, 60)
    while "greedy" not in engine.finals:
        engine.compute()
    for i in (1, 2):
        engine.add(make_request(f"slow{i}", [i] * 4, max_tokens=60), b"slow")
    engine.compute()
    assert len(engine.list_running(b"slow")) == 3
    engine.add(make_request("again", [2] * 8, max_tokens=2), b"greedy")
    engine.compute()
    assert engine.list_running(b"greedy") == []
    while "again" not in engine.finals:
        engine.compute()
    assert engine.requests["slow2"].num_preemptions == 1
    engine.run()


@pytest.mark.parametrize("num_tenants", [1, 1000])
def test_neither_waiting_requests_nor_waiting_tenants_cost_a_step_anything(num_tenants: int):
    costs: list[int] = []
    for num_waiting in (1, 1000):
        engine = make_engine(512, max_num_seqs=16)
        for i in range(16 + num_waiting):
            request = make_request(f"r{i}", [i % 900] * 4, max_tokens=100, tenant=str(i % num_tenants))
            engine.add(request)
        for _ in range(3):
            engine.compute()
        costs.append(min(count_calls(engine) for _ in range(3)))
    assert costs[1] < costs[0] + 100
    assert len(policy_of(engine)._accounts._accounts) == min(num_tenants, 1016)


def test_an_idle_engine_remembers_no_tenant():
    engine = make_engine()
    for i in range(50):
        engine.add(make_request(f"r{i}", [1] * 9, max_tokens=3, tenant=str(i)))
    engine.run()
    assert len(policy_of(engine)._accounts._accounts) == 0


def test_a_waiting_request_says_what_it_waits_for():
    engine = make_engine(max_num_seqs=2)
    flood(engine, b"a", 4, 30, 60)
    flood(engine, b"b", 3, 8, 60)
    for _ in range(3):
        engine.compute()
    why = policy_of(engine).why_waiting
    assert "no free row (2 running" in why(engine.requests["b1"])
    assert why(engine.requests["b2"]) == "behind earlier requests of its tenant"
    assert why(engine.requests["a1"]) == "its tenant has been served more than others"


def test_prompts_of_one_tenant_stretch_the_steps_of_others_no_more_than_one_long_prompt() -> None:
    engine = make_engine(512, max_num_batched_tokens=256, max_num_seqs=32)
    engine.add(make_request("light", [1, 2, 3], max_tokens=60), b"light")
    assert engine.compute() == {"light": 3}
    flood(engine, b"heavy", 8, 48, 4)
    while not all(engine.tokens[f"heavy{i}"] for i in range(8)):
        work = engine.compute()
        assert work.pop("light") == 1
        prompts = {name: count for name, count in work.items() if count > 1}
        assert sum(prompts.values()) <= 64
    engine.core.abort_requests(b"light", ["light"])
    flood(engine, b"other", 5, 48, 4)
    while engine.core.num_unfinished:
        assert engine.turn()


def test_prompts_of_one_tenant_take_whole_steps_beside_its_own_decodes() -> None:
    engine = make_engine(512, max_num_batched_tokens=256, max_num_seqs=32)
    flood(engine, b"only", 6, 40, 40)
    assert sum(engine.compute().values()) == 240
    for i in range(6):
        engine.add(make_request(f"more{i}", [i, 5, 9] * 14, max_tokens=4), b"only")
    assert sum(count for count in engine.compute().values() if count > 1) > 64


def make_streaming(num_streams: int) -> FakeEngine:
    """Streams of one tenant that decode, and then long prompts of another one, which holds no row yet."""
    engine = make_engine(
        600,
        max_model_len=1024,
        verify=False,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    flood(engine, b"streams", num_streams, 8, 500)
    for _ in range(3):
        engine.turn()
    flood(engine, b"long", 20, 500, 100)
    return engine


def count_tokens(work: dict[str, int], tenant: str) -> int:
    return sum(count for name, count in work.items() if name.startswith(tenant))


def test_a_step_that_leaves_out_others_decodes_has_no_more_prompt_tokens_than_one_with_them() -> None:
    engine = make_streaming(20)
    work = engine.compute()
    assert count_tokens(work, "streams") == 0
    assert 0 < count_tokens(work, "long") <= engine.config.scheduler.max_prompt_tokens_beside_decodes


def test_who_was_served_more_stops_no_streams_though_it_has_fewer_rows() -> None:
    engine = make_streaming(20)
    decodes = [count_tokens(engine.compute(), "streams") for _ in range(20)]
    assert decodes == [0] + [20] * 19  # once for a newcomer's first step
