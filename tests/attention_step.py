"""A step of attention for the kernels' tests: shuffled blocks full of numbers, the reference, how far off
roundings may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from quire.kernels.attention.paged_attention import paged_attention_reference
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
# Requests as `AttentionStep` takes them: lengths around the borders of blocks (8 to 128 tokens) and tiles.
MIXED = [(1, 1), (3, 3), (1, 70), (40, 150), (1, 64), (1, 65), (18, 18)]
SHAPES = [
    # heads, kv heads, head size, block size
    (4, 2, 16, 16),
    (1, 1, 8, 8),
    (14, 2, 40, 128),
    (6, 1, 80, 8),
    (2, 2, 256, 32),
    (33, 1, 32, 64),
]


@dataclass
class AttentionStep:
    """Requests as (tokens of this step, tokens in the cache after it).

    Slots that no request owns hold NaN, table entries past a request's blocks a number out of range.
    """

    query: Tensor  # [T, H, D]
    k_cache: Tensor  # as the reference reads it
    v_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor

    @classmethod
    def draw(
        cls,
        requests: list[tuple[int, int]],
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        generator = torch.Generator().manual_seed(len(requests) + head_size)
        needed = [-(-seq_len // block_size) for _, seq_len in requests]
        order = torch.randperm(sum(needed) + 2, generator=generator, dtype=torch.int32)
        size = (len(order), num_kv_heads, block_size, head_size)
        k_cache = torch.randn(size, generator=generator).to(dtype)
        v_cache = torch.randn(size, generator=generator).to(dtype)
        tables = torch.full((len(requests), max(needed)), 1 << 30, dtype=torch.int32)
        first = 0
        for row, (count, (_, seq_len)) in enumerate(zip(needed, requests, strict=True)):
            tables[row, :count] = order[first : first + count]
            first += count
            used = seq_len - (count - 1) * block_size
            k_cache[tables[row, count - 1], :, used:] = torch.nan
            v_cache[tables[row, count - 1], :, used:] = torch.nan
        starts = torch.tensor([0, *(tokens for tokens, _ in requests)]).cumsum(0).int()
        query = torch.randn(int(starts[-1]), num_heads, head_size, generator=generator).to(dtype)
        lengths = torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32)
        return cls(query, k_cache, v_cache, tables, starts, lengths)

    def reference(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        ahead: int = 0,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        return paged_attention_reference(
            self.query,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_starts.tolist(),
            self.seq_lens.tolist(),
            window,
            soft_cap,
            scale,
            ahead,
            position_bias,
        )

    def only(self, request: int, first: int, count: int) -> Self:
        """The step in which this request alone computes `count` of its tokens, from the `first` on."""
        start, end = self.query_starts[request : request + 2].tolist()
        context = int(self.seq_lens[request]) - (end - start)
        return replace(
            self,
            query=self.query[start + first : start + first + count].contiguous(),
            block_tables=self.block_tables[request : request + 1].contiguous(),
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([context + first + count], dtype=torch.int32),
        )

    @property
    def largest_value(self) -> float:
        return self.v_cache.float().nan_to_num().abs().max().item()

    def bound(self) -> float:
        """Largest error in float32: that of the scores moves the weights, then a weighted mean.

        A score is a chain of D products of about |q| |k|; its absolute error is a relative error of its
        weight. The mean over L keys adds a chain of L and the exponential's 2 units. Kernel and reference
        each.
        """
        head_size, length = self.query.shape[2], int(self.seq_lens.max())
        query = self.query.float().norm(dim=-1).max().item()
        key = self.k_cache.float().nan_to_num().norm(dim=-1).max().item()
        score_error = head_size * EPS * query * key / head_size**0.5
        return 2 * self.largest_value * (2 * score_error + (length**0.5 + 4) * EPS)
