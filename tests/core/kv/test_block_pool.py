"""BlockPool: counts, order of reuse, and when a content can be found."""

from __future__ import annotations

from collections import Counter

import pytest
from quire.core.kv.block_pool import BlockPool


def test_every_block_is_taken_once():
    pool = BlockPool(5)
    assert sorted(pool.take(5)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert not pool.check(Counter(range(5)))


def test_a_free_block_is_found_until_it_is_taken():
    pool = BlockPool(2)
    a, b = pool.take(2)
    assert pool.register(a, b"a")
    pool.release([a, b])
    assert pool.find(b"a") == a
    assert pool.num_free == 2
    assert pool.take(1) == [b]  # though it was free last: it has no content worth keeping
    assert pool.find(b"a") == a
    pool.take(1)
    assert pool.find(b"a") is None


def test_blocks_are_reused_in_the_order_of_their_release():
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block_id in blocks:
        pool.register(block_id, b"%d" % block_id)
    pool.release([blocks[1]])
    pool.release([blocks[2], blocks[0]])
    assert pool.take(3) == [blocks[1], blocks[2], blocks[0]]


def test_a_found_free_block_stops_being_free_and_keeps_its_content():
    pool = BlockPool(2)
    (a,) = pool.take(1)
    pool.register(a, b"a")
    pool.release([a])
    pool.acquire(a)
    assert pool.num_free == 1
    assert pool.take(1) != [a]
    assert pool.find(b"a") == a


def test_a_shared_block_is_free_after_the_last_release():
    pool = BlockPool(1)
    pool.take(1)
    pool.acquire(0)
    pool.release([0])
    assert pool.num_free == 0
    pool.release([0])
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="more often"):
        pool.release([0])


def test_the_first_block_of_a_content_stays_in_the_index():
    pool = BlockPool(2)
    a, b = pool.take(2)
    assert pool.register(a, b"same")
    assert not pool.register(b, b"same")
    assert pool.find(b"same") == a
    pool.release([b])
    assert pool.find(b"same") == a
    assert not pool.check(Counter([a]))


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


def test_the_check_names_a_leaked_and_a_doubly_owned_block():
    pool = BlockPool(3)
    a, b = pool.take(2)
    assert any(f"block {a}" in problem for problem in pool.check(Counter([b])))
    assert any(f"block {b}" in problem for problem in pool.check(Counter([a, b, b])))
    assert not pool.check(Counter([a, b]))
