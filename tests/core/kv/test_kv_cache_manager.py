"""KVCacheManager: prefix hits, accounting, and a random walk of many requests on a tiny pool."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import make_config, make_live
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from quire.core.kv.block_pool import BlockPool
from quire.core.kv.kv_cache_manager import BlockHasher, KVCacheManager
from quire.core.scheduling.request import HeldBlocks, Request

BLOCK_SIZE = 8


def make_manager(num_blocks: int) -> KVCacheManager:
    hasher = BlockHasher(BLOCK_SIZE, make_config().model.spec, b"seed")
    return KVCacheManager(BlockPool(num_blocks), BLOCK_SIZE, hasher)


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> list[int]:
    """Count tokens as computed, as a step does, and return the blocks that became findable."""
    request.num_computed_tokens += (
        request.num_tokens - request.num_computed_tokens if num_tokens is None else num_tokens
    )
    indexed: list[int] = []
    manager.index_full_blocks(request, indexed)
    return indexed


def ids_of(request: Request) -> list[int]:
    """Its blocks of the first group."""
    return request.blocks[0].ids if request.blocks else []


def find_ids(manager: KVCacheManager, request: Request) -> list[int]:
    """The blocks of its prefix hit in the first group."""
    return manager.find_prefix(request).groups[0].ids


def admit(manager: KVCacheManager, request: Request, reserve: int = 0) -> bool:
    return manager.allocate(request, manager.find_prefix(request), reserve)


def test_a_prefix_is_found_in_whole_blocks_and_never_whole():
    manager = make_manager(20)
    first = make_live(list(range(32)))
    assert admit(manager, first)
    compute(manager, first)
    for length in (1, 8, 9, 16, 17, 31, 32):
        hits = find_ids(manager, make_live(list(range(length))))
        assert hits == ids_of(first)[: (length - 1) // BLOCK_SIZE]
    assert find_ids(manager, make_live([*range(32), 999])) == ids_of(first)
    assert find_ids(manager, make_live([*range(12), 999, *range(13, 32)])) == ids_of(first)[:1]


def test_a_block_is_found_only_once_it_is_computed():
    manager = make_manager(20)
    first, second = make_live(list(range(32))), make_live(list(range(32)))
    assert admit(manager, first)
    assert find_ids(manager, second) == []
    assert compute(manager, first, 15) == ids_of(first)[:1]
    assert find_ids(manager, second) == ids_of(first)[:1]
    assert compute(manager, first, 1) == ids_of(first)[1:2]


def test_a_block_that_holds_a_placeholder_is_not_found():
    manager = make_manager(20)
    request = make_live(list(range(15)))
    assert admit(manager, request)
    compute(manager, request)
    request.num_placeholders += 1
    request.num_computed_tokens += 1  # token 15 is computed in flight, its value is not known
    indexed: list[int] = []
    manager.index_full_blocks(request, indexed)
    assert indexed == []
    assert request.num_indexed_blocks == 1
    request.output_token_ids.append(7)
    request.num_tokens += 1
    manager.index_full_blocks(request, indexed)
    assert indexed == ids_of(request)[1:2]


@pytest.mark.parametrize("skips", [{"prompt_logprobs": 0}, {"skip_reading_prefix_cache": True}], ids=str)
def test_some_requests_do_not_read_the_cache_but_fill_it(skips: dict[str, Any]):
    manager = make_manager(20)
    first = make_live(list(range(32)), **skips)
    assert admit(manager, first)
    compute(manager, first)
    assert find_ids(manager, make_live(list(range(32)), **skips)) == []
    assert len(find_ids(manager, make_live(list(range(32))))) == 3


def test_a_prefix_is_lost_from_its_end():
    manager = make_manager(4)
    first = make_live(list(range(32)))
    assert admit(manager, first)
    compute(manager, first)
    manager.free(first)
    assert admit(manager, make_live([7] * 16))
    assert len(find_ids(manager, make_live(list(range(33))))) == 2


def test_the_check_sees_a_block_shared_with_other_contents():
    manager = make_manager(4)
    first, second = make_live([1] * 8), make_live([2] * 8)
    assert admit(manager, first)
    manager.pool.acquire(ids_of(first)[0])
    second.blocks, second.num_slots = [HeldBlocks(list(ids_of(first)))], 8
    assert any("different contents" in problem for problem in manager.check([first, second]))


class ManagerMachine(RuleBasedStateMachine):
    """Requests come, compute, decode and go; the model is the set of contents that each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager(12)
        self.live: list[Request] = []
        self.contents: dict[int, bytes] = {}  # block -> all tokens up to its end, once computed

    @rule(
        shared=st.integers(0, 32), own=st.integers(1, 24), seed=st.integers(2, 9), reserve=st.integers(0, 3)
    )
    def admit(self, shared: int, own: int, seed: int, reserve: int) -> None:
        request = make_live([1] * shared + [seed] * own)
        hit = self.manager.find_prefix(request)
        hits = hit.groups[0].ids
        for position, block_id in enumerate(hits):
            assert self.contents[block_id] == request.packed_tokens(0, (position + 1) * BLOCK_SIZE)
        num_free = self.manager.pool.num_free
        taken = self.manager.count_taken(request, hit)
        if self.manager.allocate(request, hit, reserve):
            assert self.manager.pool.num_free == num_free - taken >= reserve
            assert len(ids_of(request)) == self.manager.count_blocks(request.num_tokens)
            assert ids_of(request)[: len(hits)] == hits
            self.live.append(request)
        else:
            assert self.manager.pool.num_free == num_free < taken + reserve

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute_a_chunk(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        missing = request.num_tokens - request.num_computed_tokens
        if missing:
            indexed = compute(self.manager, request, data.draw(st.integers(1, missing)))
            for position in range(request.num_computed_tokens // BLOCK_SIZE):
                end = (position + 1) * BLOCK_SIZE
                self.contents[ids_of(request)[position]] = request.packed_tokens(0, end)
            assert set(indexed) <= set(ids_of(request))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_id=st.integers(1, 3))
    def decode(self, data: st.DataObject, token_id: int) -> None:
        request = data.draw(st.sampled_from(self.live))
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens == len(ids_of(request)) * BLOCK_SIZE and self.manager.grow(request) is None:
            assert self.manager.pool.num_free == 0
            return
        request.output_token_ids.append(token_id)
        request.num_tokens += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.manager.free(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.manager.forget_contents(request)
        assert not find_ids(self.manager, request)

    @invariant()
    def blocks_in_are_blocks_out(self) -> None:
        assert self.manager.check(self.live) == []
        held = {block_id for request in self.live for block_id in ids_of(request)}
        assert self.manager.pool.num_free + len(held) == 12

    def teardown(self) -> None:
        for request in self.live:
            self.manager.free(request)
        assert self.manager.pool.num_free == 12


ManagerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestManagerMachine = ManagerMachine.TestCase


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16])
def test_blocks_are_counted_up(num_tokens: int):
    assert make_manager(4).count_blocks(num_tokens) == (num_tokens + 7) // 8
