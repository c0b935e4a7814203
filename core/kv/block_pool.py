"""BlockPool: who holds which KV block, which are free, and which contents can be found again.

It knows block ids, counts and hashes; not requests, tokens or devices. Every operation is O(1) a block.
A free block keeps its hash until it is really taken, so a prefix is found for as long as it is there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping


class BlockPool:
    """`num_blocks` blocks with reference counts, a least-recently-used free list and a hash index."""

    def __init__(self, num_blocks: int, on_evicted: Callable[[bytes], None] = lambda _hash: None) -> None:
        """`on_evicted` is called with each hash that can no longer be found, because its block is reused."""
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._on_evicted = on_evicted
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # The first is taken next. An OrderedDict, as popping the front of a plain dict is slow.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a holder, including those whose contents can be found."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose contents can be found."""
        return len(self._index)

    def is_free(self, block_id: int) -> bool:
        """True if nobody holds the block."""
        return self._ref_counts[block_id] == 0

    def is_held_once(self, block_id: int) -> bool:
        """True if the block has one holder."""
        return self._ref_counts[block_id] == 1

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free."""
        return self._index.get(block_hash)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks: each has one holder and no hash. The caller has checked `num_free`."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._index[block_hash]
                self._hashes[block_id] = None
                self._on_evicted(block_hash)
            self._ref_counts[block_id] = 1
        return taken

    def acquire(self, block_id: int) -> None:
        """Hold a block once more; a free one stops being free."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Hold these blocks once less. The free ones are reused in this order, those without a hash first."""
        counts, free = self._ref_counts, self._free
        for block_id in block_ids:
            counts[block_id] -= 1
            assert counts[block_id] >= 0, f"block {block_id} was released more often than held"
            if counts[block_id] == 0:
                free[block_id] = None
                if self._hashes[block_id] is None:
                    free.move_to_end(block_id, last=False)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Make a held block findable, by this name alone. False if another block already has this content:
        the first stays.
        """
        assert self._ref_counts[block_id] > 0
        if block_hash in self._index:
            return False
        if (old := self._hashes[block_id]) is not None:
            del self._index[old]
        self._index[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def unregister(self, block_id: int) -> None:
        """Make a block's content unfindable, whoever holds it. No effect on a block without a hash."""
        block_hash = self._hashes[block_id]
        if block_hash is None:
            return
        self._hashes[block_id] = None
        del self._index[block_hash]
        if self._ref_counts[block_id] == 0:
            self._free.move_to_end(block_id, last=False)

    def unregister_all(self) -> None:
        """Make every content unfindable. Blocks keep their holders."""
        for block_hash in self._index:
            self._on_evicted(block_hash)
        self._index.clear()
        self._hashes = [None] * self.num_blocks

    def map_cells(self, num_cells: int) -> tuple[bytes, int]:
        """The blocks in at most `num_cells` runs, and the length of a run; see `EngineSnapshot.block_map`."""
        counts, hashes = self._ref_counts, self._hashes
        length = max(1, -(-self.num_blocks // num_cells))
        cells = bytearray()
        for start in range(0, self.num_blocks, length):
            end = min(start + length, self.num_blocks)
            num_used = end - start - counts[start:end].count(0)
            num_cached = end - start - hashes[start:end].count(None)
            cells += bytes((255 * num_used // (end - start), 255 * num_cached // (end - start)))
        return bytes(cells), length

    def check(self, num_owners: Mapping[int, int]) -> list[str]:
        """The problems found, given how many owners each block should have."""
        problems: list[str] = []
        for block_id, count in enumerate(self._ref_counts):
            if count != num_owners.get(block_id, 0):
                problems.append(f"block {block_id}: {count} references, {num_owners.get(block_id, 0)} owners")
            if (count == 0) != (block_id in self._free):
                problems.append(f"block {block_id}: {count} references, free: {block_id in self._free}")
        if len(self._free) + sum(count > 0 for count in self._ref_counts) != self.num_blocks:
            problems.append(f"{len(self._free)} free and held blocks do not add up to {self.num_blocks}")
        for block_hash, block_id in self._index.items():
            if self._hashes[block_id] != block_hash:
                problems.append(f"block {block_id}: the index has a hash that the block has not")
        if Counter(h is not None for h in self._hashes)[True] != len(self._index):
            problems.append("a block has a hash that the index has not")
        return problems
