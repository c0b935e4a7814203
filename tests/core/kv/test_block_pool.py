"""BlockPool beside a model of it in lists: counts, order of reuse, and when a content can be found."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from quire.core.kv.block_pool import BlockPool

NUM_BLOCKS = 6
HASHES = [b"a", b"b", b"c", b"d"]


class PoolMachine(RuleBasedStateMachine):
    """Whatever is taken, shared, named and given back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        self.pool = BlockPool(NUM_BLOCKS, self.evicted.append)
        self.free = list(range(NUM_BLOCKS))  # the first is taken next
        self.holders: Counter[int] = Counter()
        self.names: dict[int, bytes] = {}

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.free)))
        expected, self.free = self.free[:count], self.free[count:]
        gone = [self.names.pop(block_id) for block_id in expected if block_id in self.names]
        num_before = len(self.evicted)
        assert self.pool.take(count) == expected
        assert self.evicted[num_before:] == gone
        self.holders.update(expected)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def acquire(self, block_id: int) -> None:
        self.pool.acquire(block_id)
        self.holders[block_id] += 1
        if block_id in self.free:
            self.free.remove(block_id)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(+self.holders)
        block_ids = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True)) if held else []
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.holders[block_id] -= 1
            if not self.holders[block_id]:  # without a content worth keeping it is taken first
                self.free.insert(len(self.free) if block_id in self.names else 0, block_id)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1), name=st.sampled_from(HASHES))
    def register(self, block_id: int, name: bytes) -> None:
        if not self.holders[block_id]:
            return
        is_new = name not in self.names.values()
        assert self.pool.register(block_id, name) == is_new, "the first block of a content stays its block"
        if is_new:
            self.names[block_id] = name

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def unregister(self, block_id: int) -> None:
        self.pool.unregister(block_id)
        if self.names.pop(block_id, None) is not None and block_id in self.free:
            self.free.remove(block_id)
            self.free.insert(0, block_id)

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        block_of = {name: block_id for block_id, name in self.names.items()}
        assert [self.pool.find(name) for name in HASHES] == [block_of.get(name) for name in HASHES]
        assert (self.pool.num_free, self.pool.num_cached) == (len(self.free), len(self.names))
        assert self.pool.check(self.holders) == []


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_block_that_nobody_holds_is_not_released():
    with pytest.raises(AssertionError, match="more often"):
        BlockPool(1).release([0])


def test_the_check_names_a_leaked_and_a_doubly_owned_block():
    pool = BlockPool(3)
    a, b = pool.take(2)
    assert any(f"block {a}" in problem for problem in pool.check(Counter([b])))
    assert any(f"block {b}" in problem for problem in pool.check(Counter([a, b, b])))
    assert not pool.check(Counter([a, b]))


def test_an_unregistered_block_is_not_found_and_is_taken_first():
    pool = BlockPool(2)
    a, b = pool.take(2)
    pool.register(a, b"a")
    pool.register(b, b"b")
    pool.release([a, b])
    pool.unregister(b)
    pool.unregister(b)
    assert pool.find(b"b") is None
    assert pool.take(1) == [b]
