"""A step of attention for the kernels' tests: shuffled blocks full of numbers, the reference, how far off
roundings may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import torch
from cache_layout import to_native_layout
from kernel_checks import TRITON_DEVICE
from quire.kernels.attention.encoder_attention import launch_encoder_attention
from quire.kernels.attention.narrow_cache import dequantize, is_narrow, make_narrow
from quire.kernels.attention.paged_attention import (
    NO_WINDOW,
    launch_paged_attention,
    pack_position_bias,
    paged_attention_reference,
)
from quire.kernels.choice import native_library
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
_rearrange = lru_cache(maxsize=1)(to_native_layout)  # requests that are taken out of a step share its caches
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
    sinks: Tensor | None = None
    value_size: int | None = None  # values are so many of the keys' first numbers

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

    @classmethod
    def draw_latents(
        cls, requests: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> Self:
        """Values are part of the keys; the shape is (heads, head size, value size, block size)."""
        heads, head_size, value_size, block_size = shape
        drawn = cls.draw(requests, heads, 1, head_size, block_size, dtype)
        return replace(drawn, v_cache=drawn.v_cache[..., :0].contiguous(), value_size=value_size)

    @classmethod
    def draw_prompts(cls, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> Self:
        """Whole prompts; the shape is (heads, kv heads, head size)."""
        return cls.draw([(length, length) for length in lengths], *shape, dtype=dtype)

    def narrow(self, dtype: torch.dtype) -> Self:
        """With caches of codes; slots that no request owns have NaN as their scale."""
        values = self.v_cache if self.value_size is not None else make_narrow(self.v_cache, dtype)
        return replace(self, k_cache=make_narrow(self.k_cache, dtype), v_cache=values)

    def draw_bias(self) -> Tensor:
        """A position bias for these requests."""
        size = (self.query.shape[1], 2 * int(self.seq_lens.max()) - 1)
        return pack_position_bias(torch.randn(size, generator=torch.Generator().manual_seed(3)))

    def launch_native(
        self, window: int | None = None, soft_cap: float | None = None, scale: float | None = None
    ) -> Tensor:
        """By the compiled kernel, whose cache has a layout of its own."""
        caches = _rearrange(self.k_cache, self.v_cache, self.query.dtype == torch.bfloat16)
        tensors = self.block_tables, self.query_starts, self.seq_lens
        flat, heads = self.query.flatten(1), self.query.shape[1]
        out = launch_paged_attention(
            *(native_library(), flat, flat.shape[1], heads, *caches, *tensors, window, soft_cap, scale),
            sinks=self.sinks,
            value_size=self.value_size,
        )
        return out.unflatten(1, (heads, -1))

    def launch_encoder(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """By the compiled kernel for whole prompts that see both ways."""
        heads = self.query.shape[1], self.k_cache.shape[1]
        edits = window, soft_cap, scale, position_bias
        return launch_encoder_attention(
            native_library(), self.project(), *heads, self.query_starts, *edits
        ).view_as(self.query)

    def project(self) -> Tensor:
        """qkv [T, (H + 2 G) D] of whole prompts."""
        parts = [self.query]
        for cache in (self.k_cache, self.v_cache):
            rows: list[Tensor] = []
            for table, length in zip(self.block_tables, self.seq_lens.tolist(), strict=True):
                blocks = cache[table[: -(-length // cache.shape[2])].long()]
                rows.append(blocks.transpose(1, 2).flatten(0, 1)[:length])
            parts.append(torch.cat(rows))
        return torch.cat(parts, 1).flatten(1)

    def launch_triton(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        ahead: int = 0,
        position_bias: Tensor | None = None,
        num_processors: int = 1,
        is_strict: bool = False,
    ) -> Tensor:
        """More processors ask for more splits; strict splits have 64 keys."""
        from quire.kernels.attention import attention_plan_triton, paged_attention_triton

        query_lens = self.query_starts.diff()
        plan = attention_plan_triton.plan_attention(
            int((query_lens == 1).sum()),
            int((query_lens > 1).sum()),
            len(query_lens),
            paged_attention_triton.count_head_tiles(
                self.query.shape[1], self.k_cache.shape[1], self.value_size
            ),
            int(self.seq_lens.max()),
            num_processors,
            is_strict,
            strict_split_keys=64,
        )
        num_tokens, heads, head_size = self.query.shape
        # The queries lie inside longer rows, as in the fused projection.
        rows = torch.full((num_tokens, (heads + 2) * head_size), torch.nan, dtype=self.query.dtype)
        rows[:, : heads * head_size] = self.query.flatten(1)
        tensors = [self.k_cache, self.v_cache, self.block_tables, self.query_starts, self.seq_lens]
        tensors = [tensor.to(TRITON_DEVICE) for tensor in tensors]
        work = attention_plan_triton.launch_plan(plan, *tensors[-2:], window)
        bias = None if position_bias is None else position_bias.to(TRITON_DEVICE)
        out = paged_attention_triton.launch_paged_attention(
            *(rows.to(TRITON_DEVICE), rows.shape[1], heads, *tensors),
            *(window, plan, work, soft_cap, scale, ahead, bias),
            sinks=None if self.sinks is None else self.sinks.to(TRITON_DEVICE),
            value_size=self.value_size,
        )
        return out.unflatten(1, (heads, -1)).cpu()

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
            self.sinks,
            self.value_size,
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
        return to_floats(self.v_cache if self.value_size is None else self.k_cache).abs().max().item()

    def bound(self) -> float:
        """Largest error in float32: that of the scores moves the weights, then a weighted mean.

        A score is a chain of D products of about |q| |k|; its absolute error is a relative error of its
        weight. The mean over L keys adds a chain of L and the exponential's 2 units. Kernel and reference
        each.
        """
        head_size, length = self.query.shape[2], int(self.seq_lens.max())
        query = self.query.float().norm(dim=-1).max().item()
        key = to_floats(self.k_cache).norm(dim=-1).max().item()
        score_error = head_size * EPS * query * key / head_size**0.5
        return 2 * self.largest_value * (2 * score_error + (length**0.5 + 4) * EPS)

    def assert_near(
        self, actual: Tensor, expected: Tensor, soft_cap: float | None = None, rounds_weights: bool = True
    ) -> float:
        """In 16 bits a kernel may round each weight too, and both round the result, perhaps across a tie.

        Returns the absolute part of the bound.
        """
        # tanh by way of exp is off by 4 units of 1: as many of the cap in a score, so in its weight.
        bound, rtol = self.bound() + 8 * EPS * (soft_cap or 0.0) * self.largest_value, 0.0
        if actual.dtype != torch.float32:
            rtol = torch.finfo(actual.dtype).eps
            bound += self.largest_value * rtol / 2 * rounds_weights
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=bound)
        return bound


def count_ahead(window: int | None) -> int:
    """Of a model that sees both ways."""
    return NO_WINDOW if window is None else window - 1


def to_floats(cache: Tensor) -> Tensor:
    """A cache's numbers in float32; 0 where NaN."""
    return (dequantize(cache) if is_narrow(cache) else cache.float()).nan_to_num()
