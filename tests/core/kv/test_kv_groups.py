"""KV groups in the core: what a window frees, what a hit needs of each group, one pool under all of them."""

from __future__ import annotations

import pytest
from fakes import FakeEngine, make_config, make_live, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache_manager import BlockHasher, KVCacheManager
from quire.core.scheduling.request import Request
from quire.ipc.spec.config import SchedulerConfig

BLOCK_SIZE = 4
MAX_STEP_TOKENS = 8
WINDOWS = [(1,), (5,), (None, 4), (None, 9, 9), (3, 12), (None, None, 6, 2)]


def make_manager(num_blocks: int, windows: tuple[int | None, ...]) -> KVCacheManager:
    hasher = BlockHasher(BLOCK_SIZE, make_config().model.spec, b"seed")
    pool = BlockPool(num_blocks)
    return KVCacheManager(pool, BLOCK_SIZE, hasher, windows=windows, max_step_tokens=MAX_STEP_TOKENS)


def compute(manager: KVCacheManager, request: Request) -> None:
    """All of a prompt, in chunks."""
    while missing := request.num_tokens - request.num_computed_tokens:
        if request.num_computed_tokens + min(missing, MAX_STEP_TOKENS) > request.num_slots:
            manager.make_room(request, min(missing, MAX_STEP_TOKENS))
        request.num_computed_tokens += min(missing, MAX_STEP_TOKENS)
        manager.index_full_blocks(request, [])


def test_a_hit_needs_of_a_window_only_what_the_next_token_sees() -> None:
    manager = make_manager(60, (None, 6))
    first = make_live(list(range(40)))
    assert manager.allocate(first, manager.find_prefix(first), 0)
    compute(manager, first)
    assert first.blocks[1].first > 0
    manager.free(first)
    hit = manager.find_prefix(make_live([*range(32), 99, 98]))
    assert (hit.num_blocks, hit.groups[1].first, len(hit.groups[1].ids)) == (8, 6, 2)
    # Without the window's last block a hit ends where the window has all that it sees.
    manager.pool.unregister(hit.groups[1].ids[-1])
    assert manager.find_prefix(make_live([*range(32), 99, 98])).num_blocks == 7
    for block_id in range(60):
        if block_id not in hit.groups[0].ids:
            manager.pool.unregister(block_id)
    assert manager.find_prefix(make_live([*range(32), 99, 98])).num_blocks == 0


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("windows", [(16,), (None, 16, 16)])
def test_a_prompt_that_a_pool_holds_only_in_part_runs_to_its_end(
    windows: tuple[int | None, ...], run_ahead: int
) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=2, run_ahead=run_ahead)
    config = make_config(max_model_len=512, kv_windows=windows, scheduler=scheduler)
    num_blocks = config.max_blocks_per_request
    assert num_blocks < len(windows) * config.max_blocks_per_sequence
    engine = FakeEngine(config, num_blocks)
    engine.add(make_request("long", list(range(400)), max_tokens=100))
    engine.run()
    assert len(engine.tokens["long"]) == 100
    assert not engine.core.check_integrity()


class GroupMachine(RuleBasedStateMachine):
    """Requests with several groups; the model is what each block holds, and of which group."""

    @initialize(windows=st.sampled_from(WINDOWS))
    def begin(self, windows: tuple[int | None, ...]) -> None:
        self.windows = windows
        self.num_blocks = 14 * len(windows)
        self.manager = make_manager(self.num_blocks, windows)
        self.live: list[Request] = []
        self.contents: dict[int, tuple[int, bytes]] = {}

    @rule(shared=st.integers(0, 24), own=st.integers(1, 16), seed=st.integers(2, 5))
    def admit(self, shared: int, own: int, seed: int) -> None:
        request = make_live([1] * shared + [seed] * own)
        hit, num_free = self.manager.find_prefix(request), self.manager.pool.num_free
        taken = self.manager.count_taken(request, hit)
        for group, held in enumerate(hit.groups):
            assert held.end == hit.num_blocks
            for place, block_id in enumerate(held.ids, held.first):
                end = (place + 1) * BLOCK_SIZE
                assert self.contents[block_id] == (group, request.packed_tokens(0, end))
        if self.manager.allocate(request, hit, 0):
            assert self.manager.pool.num_free == num_free - taken
            self.live.append(request)
        else:
            assert self.manager.pool.num_free == num_free < taken

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute_a_chunk(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        missing = min(request.num_tokens - request.num_computed_tokens, MAX_STEP_TOKENS)
        if not missing:
            return
        count = data.draw(st.integers(1, missing))
        if request.num_computed_tokens + count > request.num_slots:
            self.manager.make_room(request, count)
        self.write(request, min(count, request.num_slots - request.num_computed_tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_id=st.integers(1, 3))
    def decode(self, data: st.DataObject, token_id: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens == request.num_slots:
            num_free, growth = self.manager.pool.num_free, self.manager.count_growth(request)
            if self.manager.grow(request) is None:
                assert num_free < growth
                return
            assert self.manager.pool.num_free == num_free - growth
        request.output_token_ids.append(token_id)
        request.num_tokens += 1
        self.write(request, 1)

    def write(self, request: Request, count: int) -> None:
        """Compute `count` tokens, each of which finds what it sees in every group."""
        start = request.num_computed_tokens
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            assert request.blocks[group].first <= first // BLOCK_SIZE
            assert request.blocks[group].end * BLOCK_SIZE >= start + count
        request.num_computed_tokens += count
        self.manager.index_full_blocks(request, [])
        for group, held in enumerate(request.blocks):
            for place, block_id in enumerate(held.ids, held.first):
                end = (place + 1) * BLOCK_SIZE
                if start < end <= request.num_computed_tokens:
                    self.contents[block_id] = group, request.packed_tokens(0, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.manager.free(request)

    @invariant()
    def blocks_in_are_blocks_out(self) -> None:
        if hasattr(self, "manager"):
            assert self.manager.check(self.live) == []
            held = {block_id for request in self.live for of in request.blocks for block_id in of.ids}
            assert self.manager.pool.num_free + len(held) == self.num_blocks


GroupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestGroupMachine = GroupMachine.TestCase
