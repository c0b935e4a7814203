"""State slots: who has which, what gives way, and which states a hit goes on from."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, make_config, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from quire.core.kv.state_slots import Snapshot, StateSlots
from quire.ipc.protocol.messages import EngineCoreRequest
from quire.ipc.spec.config import EngineConfig, SchedulerConfig
from quire.ipc.spec.model_spec import NO_ATTENTION

BLOCK_SIZE = 8


def make_hybrid(
    *, num_slots: int = 12, max_num_seqs: int = 4, max_model_len: int = 512, run_ahead: int = 2
) -> EngineConfig:
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, run_ahead=run_ahead)
    return make_config(
        max_model_len=max_model_len, block_size=BLOCK_SIZE, scheduler=scheduler, num_state_slots=num_slots
    )


def run(engine: FakeEngine, request: EngineCoreRequest) -> int:
    """Run it to its end; its cached tokens."""
    engine.add(request)
    engine.run()
    outputs = [output for output in engine.outputs if output.request_id == request.request_id]
    return next(output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None)


def find_miss(engine: FakeEngine, request: EngineCoreRequest) -> str:
    """Why its prefix is not found, as a live view says."""
    engine.add(request)
    engine.launch()
    reason = engine.requests[request.request_id].prefix_miss
    engine.finish_step()
    engine.run()
    return reason


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("num_output", [3, 4, 5, 6, 11, 12, 13])
def test_the_next_turn_goes_on_at_the_last_border_of_the_answer(num_output: int, run_ahead: int) -> None:
    engine = FakeEngine(make_hybrid(run_ahead=run_ahead), 64)
    prompt = list(range(20))
    assert run(engine, make_request("first", prompt, max_tokens=num_output)) == 0
    turn = [*prompt, *engine.tokens["first"], 7, 7, 7]
    cached = run(engine, make_request("second", turn, max_tokens=2))
    assert (
        cached == (20 + num_output - 1) // BLOCK_SIZE * BLOCK_SIZE
    )  # the last one's K and V were never made
    assert engine.core.check_integrity() == []


def test_the_same_prompt_goes_on_at_its_last_border() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    for length in (24, 25):
        prompt = [length] * length
        assert run(engine, make_request(f"{length}", prompt, max_tokens=1)) == 0
        assert run(engine, make_request(f"{length} again", prompt, max_tokens=1)) == (length - 1) // 8 * 8


def test_a_beginning_that_two_have_shared_is_found_by_the_third() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    shared = list(range(32))
    run(engine, make_request("a", [*shared, *[100] * 20], max_tokens=1))
    reason = find_miss(engine, make_request("b", [*shared, *[200] * 20], max_tokens=1))
    assert reason == "hit lost for want of a state: 32 tokens; no such prefix"
    assert engine.core.stats().prefix_misses_no_state_total == 32
    assert run(engine, make_request("c", [*shared, *[300] * 20], max_tokens=1)) == 32


def test_a_salt_keeps_states_apart_as_it_does_blocks() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    prompt = list(range(30))
    run(engine, make_request("a", prompt, max_tokens=1, cache_salt="one"))
    assert run(engine, make_request("b", prompt, max_tokens=1, cache_salt="two")) == 0
    assert run(engine, make_request("c", prompt, max_tokens=1, cache_salt="one")) == 24


def test_without_a_slot_to_spare_everything_is_computed() -> None:
    engine = FakeEngine(make_hybrid(num_slots=1, max_num_seqs=1), 64)
    prompt = list(range(30))
    requests = [make_request(name, prompt, max_tokens=9) for name in "ab"]
    assert [run(engine, request) for request in requests] == [0, 0]
    engine.check_undisturbed(requests)
    assert not any(step.state_saves or step.state_copies for step in engine.steps)


def test_a_long_prompt_leaves_states_on_its_way_where_slots_are_free() -> None:
    # With one to spare, the state at the last border takes it over.
    for num_slots, expected in ((12, [2048, 4096, 5000]), (2, [2048, 5000])):
        engine = FakeEngine(make_hybrid(num_slots=num_slots, max_num_seqs=1, max_model_len=8192), 1024)
        run(engine, make_request("a", [*range(997)] * 5 + [3] * 20, max_tokens=1))
        assert [n for step in engine.steps for _, n, _ in step.state_saves] == expected


def test_the_next_turn_may_lack_what_opened_the_answer() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    for length in range(40, 48):
        prompt = [length] * length
        run(engine, make_request(f"{length}", prompt, max_tokens=1))
        turn = [*prompt[:-4], *[1] * 20]
        assert run(engine, make_request(f"{length} next", turn, max_tokens=1)) == (length - 4) // 8 * 8


def test_a_model_without_attention_goes_on_from_states_alone() -> None:
    config = make_hybrid(num_slots=8)
    [layer] = config.model.spec.layers
    spec = replace(config.model.spec, layers=(replace(layer, attention=NO_ATTENTION),))
    engine = FakeEngine(replace(config, model=replace(config.model, spec=spec)), 0)
    requests = [make_request(f"{i}", list(range(i, i + 100)), max_tokens=9) for i in range(6)]
    engine.add_all(requests)
    engine.run()
    engine.check_undisturbed(requests)
    turn = [*range(5, 105), *engine.tokens["5"], 7, 7]
    engine.add(request := make_request("next", turn, max_tokens=12))
    for _ in range(5):
        engine.compute()
    assert engine.requests["next"].num_cached_tokens == 104
    num_computed = engine.requests["next"].num_computed_tokens
    engine.scheduler._preempt(engine.scheduler.running[0])  # pyright: ignore[reportPrivateUsage]
    step = engine.launch()
    assert step is not None
    assert [new.num_computed_tokens for new in step.new_requests] == [num_computed]
    engine.finish_step()
    engine.run()
    engine.check_undisturbed([request])
    assert engine.core.reset_prefix_cache()
    assert engine.core.stats().state_slots_cached == 0


def test_a_preempted_request_goes_on_where_it_was() -> None:
    engine = FakeEngine(make_hybrid(max_num_seqs=2, num_slots=6), 64)
    request = make_request("a", list(range(30)), max_tokens=30)
    engine.add(request)
    for _ in range(7):
        engine.compute()
    num_computed = engine.requests["a"].num_computed_tokens
    assert num_computed % BLOCK_SIZE
    engine.scheduler._preempt(engine.scheduler.running[0])  # pyright: ignore[reportPrivateUsage]
    step = engine.launch()
    assert step is not None
    assert [new.num_computed_tokens for new in step.new_requests] == [num_computed]
    assert step.state_copies == []  # it has the same slot again
    engine.finish_step()
    engine.run()
    engine.check_undisturbed([request])


def test_a_lost_worker_leaves_no_state_behind() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    prompt = list(range(30))
    run(engine, make_request("a", prompt, max_tokens=20))
    assert engine.core.stats().state_slots_cached == 2
    engine.worker.lose()
    engine.core.failures.lose_worker("killed")
    stats = engine.core.stats()
    assert (stats.state_slots_used, stats.state_slots_cached, stats.state_slots_total) == (0, 0, 12)
    assert run(engine, make_request("b", prompt, max_tokens=1)) == 0


def test_a_failed_steps_states_are_not_found() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    prompt = list(range(30))
    engine.add(make_request("a", prompt, max_tokens=5))
    engine.worker.fail_next = "injected"
    engine.launch()
    assert engine.core.stats().state_slots_cached == 1
    engine.finish_step()
    assert engine.core.stats().state_slots_cached == 0
    assert engine.core.check_integrity() == []
    engine.run()
    engine.check_undisturbed([make_request("a", prompt, max_tokens=5)])


def test_a_chat_of_twenty_turns_computes_what_is_new() -> None:
    engine = FakeEngine(make_hybrid(max_model_len=2048), 512)
    chat = list(range(100))
    shares: list[float] = []
    for turn in range(20):
        cached = run(engine, make_request(f"{turn}", chat, max_tokens=21))
        shares.append(cached / ((len(chat) - 29) // BLOCK_SIZE * BLOCK_SIZE) if turn else 1.0)
        chat = [*chat, *engine.tokens[f"{turn}"], *[turn] * 8]
    assert min(shares) >= 0.95


@pytest.mark.parametrize("num_own", [0, 20])
def test_requests_that_come_together_compute_what_they_share_twice_at_most(num_own: int) -> None:
    engine = FakeEngine(make_hybrid(num_slots=16, max_num_seqs=8), 512)
    shared = list(range(300))
    requests = [make_request(f"{i}", [*shared, *[i] * num_own], max_tokens=3) for i in range(8)]
    engine.add_all(requests)
    engine.run()
    engine.check_undisturbed(requests)
    own = 300 % BLOCK_SIZE + num_own + BLOCK_SIZE
    assert engine.core.stats().prompt_tokens_total <= (2 if num_own else 1) * 300 + 8 * own


class SlotsMachine(RuleBasedStateMachine):
    """Requests come and go, and snapshots of named states are taken, against a plain list of who is older."""

    @initialize(num_rows=st.integers(1, 4), num_more=st.integers(0, 4))
    def start(self, num_rows: int, num_more: int) -> None:
        self.num_rows = num_rows
        self.slots = StateSlots(num_rows + num_more)
        self.held: list[int] = []
        self.order: list[Snapshot] = []  # the least recently used first
        self.contents: dict[int, bytes] = {}  # what a slot has been written last

    def _kept(self) -> list[Snapshot]:
        self.order = [snapshot for snapshot in self.order if snapshot.is_kept]
        return self.order

    @precondition(lambda self: len(self.held) < self.num_rows)
    @rule(name=st.binary(min_size=1, max_size=1), moves=st.booleans())
    def enter(self, name: bytes, moves: bool) -> None:
        source = self.slots.find(name)
        num_before, oldest = len(self._kept()), self._kept()[:1]
        was_full = len(self.held) + num_before == self.slots.num_slots
        slot = self.slots.take(source, moves=moves and source is not None)
        assert slot not in self.held
        self.held.append(slot)
        if source is not None and source.is_kept:
            assert self.contents[source.slot] == name
            self.order.remove(source)
            self.order.append(source)
        elif source is not None:
            assert slot == source.slot
        elif was_full:
            assert slot == oldest[0].slot
        self.contents[slot] = b"row"

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 3), name=st.binary(min_size=1, max_size=1), keeps=st.booleans())
    def leave(self, place: int, name: bytes, keeps: bool) -> None:
        slot = self.held.pop(place % len(self.held))
        if not keeps:
            self.slots.release(slot)
            return
        known = self.slots.find(name)
        snapshot = self.slots.keep(slot, 1, name)
        assert (snapshot is None) == (known is not None)
        if snapshot is not None:
            self.order.append(snapshot)
            self.contents[slot] = name
        elif known is not None:
            self.order.remove(known)
            self.order.append(known)

    @rule(name=st.binary(min_size=1, max_size=1), evicts=st.booleans())
    def save(self, name: bytes, evicts: bool) -> None:
        if self.slots.find(name) is not None:
            return
        kept = self._kept()
        is_full = len(self.held) + len(kept) == self.slots.num_slots
        oldest = kept[0].slot if kept else None
        snapshot = self.slots.save(1, name, self.slots.num_admitted + 1 if evicts else 0, [])
        assert (snapshot is None) == (is_full and (oldest is None or not evicts))
        if snapshot is not None:
            assert not is_full or snapshot.slot == oldest
            self.order.append(snapshot)
            self.contents[snapshot.slot] = name

    @rule(name=st.binary(min_size=1, max_size=1), new=st.binary(min_size=1, max_size=1))
    def move(self, name: bytes, new: bytes) -> None:
        snapshot = self.slots.find(name)
        if snapshot is None or self.slots.find(new) is not None:
            return
        self.slots.move(snapshot, 2)
        assert self.slots.find(name) is None
        self.slots.name(snapshot, new)
        self.order.remove(snapshot)
        self.order.append(snapshot)
        self.contents[snapshot.slot] = new

    @rule(name=st.binary(min_size=1, max_size=1))
    def forget(self, name: bytes) -> None:
        self.slots.forget(name)
        assert self.slots.find(name) is None

    @rule()
    def forget_all(self) -> None:
        self.slots.forget_all()
        assert self.slots.num_cached == 0

    @invariant()
    def each_slot_has_one_owner_and_what_its_name_says(self) -> None:
        assert self.slots.check(self.held) == []
        assert self.slots.num_used == len(self.held)
        for snapshot in self._kept():
            assert snapshot.name is not None
            assert self.slots.find(snapshot.name) is snapshot
            assert self.contents[snapshot.slot] == snapshot.name


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_check_finds_a_slot_without_an_owner_and_one_with_two() -> None:
    slots = StateSlots(3)
    first, second = slots.take(), slots.take()
    assert slots.check([first, second]) == []
    assert slots.check([first]) == [f"state slot {second} has 0 owners", "2 owners of 3 state slots"]
    assert f"state slot {first} has 2 owners" in slots.check([first, first, second])


def test_what_a_failing_step_computes_of_a_preempted_request_is_computed_again() -> None:
    engine = FakeEngine(make_hybrid(), 64)
    request = make_request("a", list(range(30)), max_tokens=30)
    engine.add(request)
    for _ in range(5):
        engine.compute()
    engine.worker.fail_next = "injected"
    engine.launch()
    engine.scheduler._preempt(engine.scheduler.running[0])  # pyright: ignore[reportPrivateUsage]
    assert engine.core.stats().state_slots_cached == 3  # of the prompt, behind it, and where it was
    engine.finish_step()
    assert engine.core.stats().state_slots_cached == 2
    engine.run()
    engine.check_undisturbed([request])
