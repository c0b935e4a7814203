"""Block tables of all rows: which KV blocks hold a row's tokens. Knows nothing of who owns a block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """int32 [max_num_seqs, max_blocks], filled from the left; ids past a row's count are stale, in range."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._counts = [0] * max_num_seqs

    def assign(self, row: int, block_ids: list[int]) -> None:
        """Give `row` a new table."""
        self._counts[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        """Extend the table of `row`."""
        start = self._counts[row]
        end = start + len(block_ids)
        assert end <= self.ids.shape[1], f"row {row}: {end} blocks, its table holds {self.ids.shape[1]}"
        self.ids[row, start:end] = block_ids
        self._counts[row] = end

    def lay_out(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
        """Give each row as many blocks as its tokens need, one row's after the other's, from the first on.

        For a step of prompts that keep nothing in the cache.
        """
        first = 0
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            num_blocks = -(-count // self.block_size)
            self.ids[row, :num_blocks] = np.arange(first, first + num_blocks)
            first += num_blocks

    def gather(self, rows: NDArray[np.int64], max_seq_len: int) -> NDArray[np.int32]:
        """int32 [R, W] tables of `rows`, as wide as `max_seq_len` tokens need."""
        width = -(-max_seq_len // self.block_size)
        return np.ascontiguousarray(self.ids[rows, :width])

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [T] place in the cache of token `positions[t]` of `rows[t]`: block * block_size + offset."""
        block, offset = np.divmod(positions, self.block_size)
        return self.ids[rows, block].astype(np.int64) * self.block_size + offset
