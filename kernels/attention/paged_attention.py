"""Attention of a step's queries over the paged KV cache, prefill and decode alike.

For a query at position p of its request: softmax over j of (q . k_j * scale) times v_j, with j from
max(0, p - window + 1) to p, or to p + ahead where a model looks ahead; the scale is 1 / sqrt(D) unless the
model has another. Key j stands in block block_table[j // block_size] at j % block_size. With a soft cap c a
score s becomes c tanh(s / c) before the softmax (Gemma 2, arXiv 2408.00118, section 2); a position bias adds
b[h, j - p] to it (MPNet, arXiv 2004.09297). A sink s[h] is one more key for each query of head h, with the
score s[h] as it is and the value 0 (gpt-oss, arXiv 2508.10925).
Where values are the first E numbers of the keys (latent attention: DeepSeek V2, arXiv 2405.04434, 2.1), heads
of V's cache have 0 numbers, those of the result E.
Bytes: each request's K and V are read once per tile of queries: 2 * seq_len * G * D elements for a decode.
Legend: T tokens, R requests, H query heads, G kv heads (H / G queries share one), D head size.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .narrow_cache import dequantize, find_format, find_head_size, is_narrow

# Scores of one tile of queries, in elements: bounds the reference's memory to 64 MB at any length.
_MAX_SCORES = 1 << 24
NO_WINDOW = 0x7FFFFFFF
_BIAS_PADDING = 64  # at least kPanel of encoder_engines.h

MAX_NATIVE_HEAD_SIZE = 640  # a latent of 512 and its rotated part of 64, in 8 bits two codes each


@functools.cache
def default_scale(head_size: int) -> float:
    """1 / sqrt(D), rounded as in float32."""
    return float(np.float32(1) / np.sqrt(np.float32(head_size)))


def paged_attention_reference(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Sequence[int],
    seq_lens: Sequence[int],
    window: int | None,
    soft_cap: float | None = None,
    scale: float | None = None,
    ahead: int = 0,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:
    """[T, H, D] of the query's type. `query` is [T, H, D], the caches are [blocks, G, block_size, D] or, in 8
    bits, as in narrow_cache.py.

    With a `value_size` E it is [T, H, E], and values are the first E numbers of keys.

    `ahead` is how many keys after itself a query sees, NO_WINDOW for all. `position_bias` is as
    `pack_position_bias` makes it, `sinks` are float32 [H].
    Works on any device and type; gathers the blocks of one request at a time and computes in float32.
    """
    if value_size is not None:
        v_cache = k_cache
    out = query.new_empty((*query.shape[:2], value_size or query.shape[2]))
    for request, seq_len in enumerate(seq_lens):
        start, end = query_starts[request], query_starts[request + 1]
        tile = max(1, _MAX_SCORES // (query.shape[1] * seq_len))
        for first in range(start, end, tile):
            last = min(first + tile, end)
            position = seq_len - (end - first)
            seen_end = min(seq_len, position + last - first + ahead)
            key, value, seen_start = _gather_seen(
                k_cache, v_cache, block_tables[request], position, window, seen_end
            )
            out[first:last] = _attend_tile(
                query[first:last],
                key,
                value[..., :value_size],
                position - seen_start,
                window,
                soft_cap,
                scale,
                ahead,
                position_bias,
                sinks,
            )
    return out


def _attend_tile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: int,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    ahead: int,
    position_bias: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """[t, H, E] for queries [t, H, D] of one request, keys [G, keys, D] and values
    [G, keys, E], `position` of them before the first query."""
    num_queries, num_heads, head_size = query.shape
    num_kv_heads, num_keys = key.shape[:2]
    # The query heads that share a kv head are stacked along the query axis: [G, H/G * t, D].
    stacked = query.float().view(num_queries, num_kv_heads, -1, head_size).permute(1, 2, 0, 3)
    scores = stacked.reshape(num_kv_heads, -1, head_size) @ key.transpose(1, 2)
    scores = scores.view(num_kv_heads, -1, num_queries, num_keys)
    scores = scores * (scale or default_scale(head_size))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_positions = torch.arange(position, position + num_queries, device=query.device).unsqueeze(1)
    distances = torch.arange(num_keys, device=query.device).unsqueeze(0) - query_positions
    if position_bias is not None:
        reach = position_bias.shape[1] // 2
        scores = scores + position_bias[:, distances + reach].view_as(scores)
    hidden = distances > ahead
    if window is not None:
        hidden |= distances <= -window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., :num_keys]
    attended = weights.reshape(num_kv_heads, -1, num_keys) @ value
    attended = attended.view(num_kv_heads, -1, num_queries, value.shape[2]).permute(2, 0, 1, 3)
    return attended.reshape(num_queries, num_heads, value.shape[2]).to(query.dtype)


def _gather_seen(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, position: int, window: int | None, seen_end: int
) -> tuple[Tensor, Tensor, int]:
    """Keys and values, float32 [G, keys, D], of those that a query at `position` or a later one sees, and the
    position of the first of them."""
    block_size = k_cache.shape[2]
    first_block = 0 if window is None else max(0, position - window + 1) // block_size
    blocks = table[first_block : -(-seen_end // block_size)]
    first = first_block * block_size
    key, value = (_gather(cache, blocks)[:, : seen_end - first] for cache in (k_cache, v_cache))
    return key, value, first


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """float32 [G, len(blocks) * block_size, D]."""
    gathered = cache[blocks.long()]
    gathered = (dequantize(gathered) if is_narrow(cache) else gathered).transpose(0, 1)
    return gathered.reshape(gathered.shape[0], -1, gathered.shape[3]).float()


def pack_position_bias(bias: Tensor) -> Tensor:
    """float32 [H, 2 L - 1] by key less query, of sequences of up to L tokens.

    It lies in memory that kernels may read before its beginning, for queries past the last.
    """
    memory = bias.new_zeros(_BIAS_PADDING + bias.numel(), dtype=torch.float32)
    memory[_BIAS_PADDING:] = bias.flatten()
    return memory[_BIAS_PADDING:].view_as(bias)


def launch_paged_attention(
    library: ctypes.CDLL,
    query: Tensor,
    query_stride: int,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    window: int | None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:
    """[T, H * D] on the CPU; with a `value_size` E, a multiple of 16, [T, H * E]. Query t begins
    `t * query_stride` elements into `query`.

    The caches are as `launch_rotate_and_write` leaves them. float32 or bfloat16, D a multiple of 8 up to 640;
    tables and lengths are int32, `sinks` float32 [H]. A row's bits depend on its own sequence alone.
    """
    num_kv_heads, block_size, head_size = *k_cache.shape[1:3], find_head_size(k_cache)
    size = value_size or head_size
    out = query.new_empty((query.shape[0], num_heads * size))
    library.quire_paged_attention(
        *(query.dtype is torch.bfloat16, query, query_stride, out, k_cache),
        None if value_size else v_cache,
        *(block_tables, block_tables.stride(0), query_starts, seq_lens, seq_lens.shape[0]),
        *(num_heads, num_kv_heads, head_size, size, block_size, NO_WINDOW if window is None else window),
        *(scale or default_scale(head_size), soft_cap or 0.0, sinks, find_format(k_cache)),
    )
    return out
