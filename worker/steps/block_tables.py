"""Block tables of all rows: which KV blocks hold a row's tokens. Knows nothing of who owns a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...ipc.protocol.step import GroupBlocks

_NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class TableGroup:
    """What the tables of a KV group need to know of it."""

    window: int | None = None
    scale: int = 1
    null_block: int = 0  # with a window: a block whose keys and values are 0, by the group's ids


_ALL = TableGroup()


class BlockTables:
    """int32 [G, max_num_seqs, max_blocks] of G KV groups.

    An id of a group is here `scale` times that of the core, which counts blocks of all the group's layers.
    What is before a row's first block or past its last is stale, in range.
    """

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, groups: Sequence[TableGroup] = (_ALL,)
    ) -> None:
        self.block_size = block_size
        self.ids: NDArray[np.int32] = np.zeros((len(groups), max_num_seqs, max_blocks), dtype=np.int32)
        self.windows = np.array([group.window or _NO_WINDOW for group in groups], dtype=np.int64)
        self.null_blocks = np.array([group.null_block for group in groups], dtype=np.int32)
        self._scales = [group.scale for group in groups]
        self._ends = [[0] * max_num_seqs for _ in groups]

    def assign(self, row: int, blocks: Sequence[GroupBlocks]) -> None:
        """Give `row` new tables."""
        for group, held in enumerate(blocks):
            self._ends[group][row] = held.first
            self.append(row, group, held.block_ids)

    def append(self, row: int, group: int, block_ids: list[int]) -> None:
        """Extend a table of `row`."""
        start = self._ends[group][row]
        end = start + len(block_ids)
        assert end <= self.ids.shape[2], f"row {row}: {end} blocks, its table holds {self.ids.shape[2]}"
        scale = self._scales[group]
        self.ids[group, row, start:end] = block_ids if scale == 1 else [scale * each for each in block_ids]
        self._ends[group][row] = end

    def lay_out(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
        """Give each row as many blocks as its tokens need, one row's after the other's, from the first on.

        For a step of prompts that keep nothing in the cache.
        """
        first = 0
        for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
            num_blocks = -(-count // self.block_size)
            self.ids[0, row, :num_blocks] = np.arange(first, first + num_blocks)
            first += num_blocks

    def gather(
        self, rows: NDArray[np.int64], computed: NDArray[np.int64], max_seq_len: int
    ) -> NDArray[np.int32]:
        """int32 [G, R, W] tables of `rows`, as wide as `max_seq_len` tokens need.

        A block that no token after the `computed` [R] of its row sees may be another's by now: kernels, which
        read whole tiles, find the null block in its place.
        """
        width = -(-max_seq_len // self.block_size)
        tables = np.ascontiguousarray(self.ids[:, rows, :width])
        for group, window in enumerate(self.windows.tolist()):
            if window < _NO_WINDOW:
                firsts = np.maximum(0, computed - window + 1) // self.block_size
                is_behind = np.arange(width) < firsts[:, None]
                tables[group][is_behind] = self.null_blocks[group]
        return tables

    def slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [G, T] places of tokens `positions[t]` of `rows[t]`: block * block_size + offset."""
        block, offset = np.divmod(positions, self.block_size)
        return self.ids[:, rows, block].astype(np.int64) * self.block_size + offset
