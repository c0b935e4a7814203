"""Attention over the paged KV cache in Triton: chunks of prompts, decodes and steps that mix them.

The formula and its reference are in paged_attention.py; here a soft cap c may turn each score s into
c tanh(s / c). One program computes a tile of query rows (tokens x the heads that share a kv head, so that K
and V are read once for all of them) over a range of keys, with the online softmax of FlashAttention
(arXiv 2205.14135) in base 2 and float32 sums. Where values are the first numbers of the keys they are the
loaded keys, turned; the keys' rest is a product of its own, and heads that are too many for a tile are dealt
out to several programs. Where a step has too few rows to fill the device, the keys of
each single-token request are split over programs, whose parts a second kernel combines (Flash-Decoding).

A step is at most three launches a layer: requests of one token, the combination of their splits, requests of
more tokens. Strict mode cuts keys at fixed places
and uses one tile shape for all of them, so that a row's bits depend on its sequence alone, whatever stands
beside it, however its prompt was cut and whether its splits ran in one program or in many.
Bytes of a decode: 2 * seq_len * G * D elements a request. Operations of a chunk: 4 * D * H per visible pair.
Legend: T tokens, R requests, H query heads, G kv heads, D head size, E value size, M rows and N keys of a
tile, S splits.
"""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import next_power_of_2
from .attention_plan_triton import ITEM_SIZE, MAX_SPLITS, AttentionPlan, SplitWork
from .narrow_cache import find_format, find_head_size
from .rotate_and_write_triton import decode

_jit: typing.Any = triton.jit

MAX_HEAD_SIZE = 256
MAX_GROUP = 128  # query heads that share a kv head
MAX_VALUE_SIZE, MAX_REST = (
    512,
    128,
)  # where values are part of the keys: of these, and of what keys have beyond
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LARGE_SHARED_BYTES = 200 << 10  # Hopper and later have 227 KB a program, Ampere 163, Ada 99
_MEDIUM_SHARED_BYTES = 160 << 10
# Elements of a tile's sums in float32, which is multiplied without tensor cores: more leave the registers.
_MAX_FLOAT32_TILE = 32 * 256
# Of a thread of 4 warps, two programs of a processor: unsaid, ptxas spills to have three.
_MAX_REGISTERS = 255
_MAX_TILE_HEADS = 16  # of a program where values are part of the keys, whose sums fill the registers
_MAX_AHEAD = 1 << 30  # so that a position and it are an int32 together
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class TileShape:
    """The tiles of an attention program."""

    rows: int  # queries times the heads of a group
    keys: int  # that are loaded together
    num_warps: int
    num_stages: int


def find_uncovered(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, value_size: int | None = None
) -> str | None:
    """What of a model these kernels do not compute, with the covered set, None if they compute it all."""
    if dtype not in DTYPES:
        return f"dtype {dtype}: float32, bfloat16 and float16 are covered"
    if value_size is not None:
        if num_kv_heads == 1 and value_size <= MAX_VALUE_SIZE and 1 <= head_size - value_size <= MAX_REST:
            return None
        return (
            f"values that are {value_size} of a key's {head_size} numbers, {num_kv_heads} kv heads: up to "
            f"{MAX_VALUE_SIZE}, with 1 to {MAX_REST} more, of one kv head are covered"
        )
    if head_size % 2 or not 2 <= head_size <= MAX_HEAD_SIZE:
        return f"head size {head_size}: even ones from 2 to {MAX_HEAD_SIZE} are covered"
    group = num_heads // num_kv_heads
    largest = MAX_GROUP if dtype != torch.float32 else min(MAX_GROUP, _MAX_FLOAT32_TILE // _pad(head_size))
    if group > largest:
        return f"{group} query heads a kv head, {dtype} of size {head_size}: up to {largest} are covered"
    return None


def count_head_tiles(num_heads: int, num_kv_heads: int, value_size: int | None) -> int:
    """Programs that share the query heads of a request's tile: one a kv head, or more where values are part
    of the keys. These have the most heads that divide all.
    """
    if value_size is None:
        return num_kv_heads
    counts = range(-(-num_heads // _MAX_TILE_HEADS), num_heads + 1)
    return next(count for count in counts if num_heads % count == 0)


def launch_paged_attention(
    query: Tensor,
    query_stride: int,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    window: int | None,
    plan: AttentionPlan,
    work: SplitWork | None,
    soft_cap: float | None = None,
    scale: float | None = None,
    ahead: int = 0,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    value_size: int | None = None,
    tile: TileShape | None = None,
) -> Tensor:
    """[T, H * D] of the query's type. Query t begins `t * query_stride` elements into `query`.

    With a `value_size` E it is [T, H * E], values are the first E numbers of keys, and `v_cache` is not read.
    Caches are [blocks, G, block_size, D] or as in narrow_cache.py, and contiguous; tables and lengths int32.
    Requests with seq_len 0 pad a captured graph's batch: their rows come back as zeros. Requests without
    tokens and tokens past the last request pad mixed steps: nothing is computed for them, and what comes back
    of them is unspecified.
    `work` is `launch_plan`'s for this window. `tile`: of all programs; None: what fits the card. Nothing here
    waits for the device.
    """
    num_kv_heads, block_size, head_size = *k_cache.shape[1:3], find_head_size(k_cache)
    head_tiles = count_head_tiles(num_heads, num_kv_heads, value_size)
    group, size = num_heads // head_tiles, value_size or head_size
    out = query.new_empty((query.shape[0], num_heads * size))
    tensors = (k_cache, v_cache, block_tables, query_starts, seq_lens)
    bias, reach = (query, 0) if position_bias is None else (position_bias, position_bias.shape[1] // 2)
    scalars = (
        *((scale or head_size**-0.5) * _LOG2_E, soft_cap or 0.0, bias, reach),
        *(query if sinks is None else sinks, query_stride, block_tables.stride(0)),
    )
    # Two kernels must merge splits with the same roundings, and a compiler may fuse each its own way.
    options = {**launch_options(query.device), "enable_fp_fusion": plan.split_keys == 0}
    constants: dict[str, typing.Any] = {
        "GROUP": group,
        "TILES": head_tiles // num_kv_heads,
        "VALUE_SIZE": size,
        "PADDED_SIZE": _pad(size),
        "REST": head_size - size,
        "PADDED_REST": _pad(max(1, head_size - size)),
        "BLOCK_SIZE": block_size,
        "WINDOW": window or 0,
        "AHEAD": min(ahead, _MAX_AHEAD),
        "HAS_SOFT_CAP": soft_cap is not None,
        "HAS_BIAS": position_bias is not None,
        "HAS_SINKS": sinks is not None,
        "KV_FORMAT": find_format(k_cache),
        "SPLIT_KEYS": plan.split_keys,
        **options,
    }
    num_requests = seq_lens.shape[0]
    if work is not None:
        shape = tile or _single_shape(query.dtype, size, group, plan)
        parts, sums = _new_parts(query, plan, num_heads, size)
        _paged_attention_kernel[(plan.num_items, head_tiles)](
            query, out, parts, sums, *tensors, work.items, num_requests, *scalars, **constants,
            IS_SINGLE=True, M=shape.rows, N=shape.keys,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
            maxnreg=_MAX_REGISTERS if shape.num_warps == 4 else None,
        )  # fmt: skip
        if plan.num_split:
            _combine_kernel[(plan.num_split, num_heads)](
                out, parts, sums, query_starts, work.items, work.split_items, scalars[4], NUM_HEADS=num_heads,
                HEAD_SIZE=size, PADDED_SIZE=_pad(size), MAX_SPLITS=MAX_SPLITS,
                HAS_SINKS=sinks is not None, IS_STRICT=plan.split_keys > 0,
                num_warps=2 if size <= MAX_HEAD_SIZE else 8, **options,
            )  # fmt: skip
    if plan.num_chunks:
        shape = tile or _chunk_shape(query.dtype, size, group, plan)
        num_tiles = query.shape[0] // (shape.rows // group) + num_requests
        _paged_attention_kernel[(num_tiles, head_tiles)](
            query, out, out, out, *tensors, seq_lens, num_requests, *scalars, **constants,
            IS_SINGLE=False, M=shape.rows, N=shape.keys,
            num_warps=shape.num_warps, num_stages=shape.num_stages,
        )  # fmt: skip
    return out


def _pad(head_size: int) -> int:
    return max(16, next_power_of_2(head_size))


def _single_shape(dtype: torch.dtype, head_size: int, group: int, plan: AttentionPlan) -> TileShape:
    """The tile for requests of one token: no more rows than the group, keys enough to hide the memory."""
    if plan.split_keys:
        return _chunk_shape(dtype, head_size, group, plan)
    if head_size > MAX_HEAD_SIZE:
        return _latent_shape(dtype, rows=16, num_warps=4)
    rows = max(16, next_power_of_2(group))
    if dtype == torch.float32:
        return TileShape(rows, 32 if _pad(head_size) <= 128 else 16, num_warps=4, num_stages=3)
    num_warps = 8 if rows > 64 else 4
    # Two programs of a processor at once, each with two tiles of K and V on the way.
    is_wide = _pad(head_size) * (1 if plan.shared_bytes >= _MEDIUM_SHARED_BYTES else 2) > 128
    return TileShape(rows, 32 if is_wide else 64, num_warps, num_stages=3)


def _chunk_shape(dtype: torch.dtype, head_size: int, group: int, plan: AttentionPlan) -> TileShape:
    """The tile for requests of more tokens; in strict mode for all, since rounding may follow the shape.

    As large as registers and the card's shared memory hold without spilling, by what the compiler reports.
    """
    if head_size > MAX_HEAD_SIZE:
        return _latent_shape(dtype, rows=16 if plan.split_keys else 32, num_warps=8)
    least = next_power_of_2(group)
    is_large = plan.shared_bytes >= _LARGE_SHARED_BYTES
    if dtype == torch.float32:  # without tensor cores a tile's products live in registers
        keys = 32 if _pad(head_size) <= 128 else 16
        return TileShape(max(16, least), keys, num_warps=4, num_stages=3)
    if _pad(head_size) > 128:
        keys = 32 if plan.shared_bytes >= _MEDIUM_SHARED_BYTES else 16
        rows = 32 if plan.split_keys else 64  # products and sums apart take more registers than fused
        return TileShape(max(rows, least), keys, num_warps=8, num_stages=3 if least <= 64 or is_large else 2)
    rows = 64 if plan.split_keys else 128
    return TileShape(max(rows, least), 64 if is_large else 32, num_warps=8, num_stages=3)


def _latent_shape(dtype: torch.dtype, rows: int, num_warps: int) -> TileShape:
    """The tile for latents of more than MAX_HEAD_SIZE numbers: few rows' sums fill the registers."""
    if dtype == torch.float32:
        return TileShape(16, 16, num_warps=8, num_stages=2)
    return TileShape(rows, 32, num_warps, num_stages=3)


def _new_parts(query: Tensor, plan: AttentionPlan, num_heads: int, value_size: int) -> tuple[Tensor, Tensor]:
    """float32 scratch: of each item weighted sums [items, H, E], maxima and sums of weights [items, H, 2]."""
    if not plan.num_split:
        return query, query  # not read
    shape = (plan.num_items, num_heads)
    parts = torch.empty((*shape, value_size), dtype=torch.float32, device=query.device)
    return parts, torch.empty((*shape, 2), dtype=torch.float32, device=query.device)


@_jit
def _find_request(
    query_starts: typing.Any, tile: typing.Any, num_requests: typing.Any, TILE_TOKENS: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """The request that `tile` belongs to, if request r has the tiles from query_starts[r] // t + r on."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TILE_TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@_jit
def _merge(
    top: typing.Any, total: typing.Any, sums: typing.Any, part_top: typing.Any, part_total: typing.Any,
    part_sums: typing.Any,
) -> typing.Any:  # fmt: skip
    """Two partial softmaxes as one: (maxima, sums of weights, weighted sums of v)."""
    new_top = tl.maximum(top, part_top)
    origin = tl.where(new_top == float("-inf"), 0.0, new_top)
    scale = tl.exp2(top - origin)
    part_scale = tl.exp2(part_top - origin)
    new_total = total * scale + part_total * part_scale
    return new_top, new_total, sums * scale[:, None] + part_sums * part_scale[:, None]


@_jit
def _add_sink(top: typing.Any, total: typing.Any, sums: typing.Any, sink: typing.Any) -> typing.Any:
    """A key more with the score `sink` and no value."""
    sink *= 1.4426950408889634
    new_top = tl.maximum(top, sink)
    scale = tl.exp2(top - new_top)
    return total * scale + tl.exp2(sink - new_top), sums * scale[:, None]


@_jit
def _load_scales(at: typing.Any, mask: typing.Any) -> typing.Any:
    return tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=mask, other=0.0)


@_jit
def _attend_keys(
    q: typing.Any, q_rest: typing.Any, top: typing.Any, total: typing.Any, sums: typing.Any,
    k_cache: typing.Any, v_cache: typing.Any, table: typing.Any, positions: typing.Any,
    kv_head: typing.Any, num_kv_heads: typing.Any, first: typing.Any, last: typing.Any, seq_len: typing.Any,
    scale: typing.Any, soft_cap: typing.Any, bias: typing.Any, head: typing.Any, reach: typing.Any,
    IS_MASKED: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, REST: tl.constexpr,
    PADDED_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, KV_FORMAT: tl.constexpr, N: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Go on with the online softmax of q [M, E], q_rest [M, D - E] over keys first..last-1, tile by tile."""
    HEAD_SIZE: tl.constexpr = VALUE_SIZE + REST
    in_tile = tl.arange(0, N)
    dims = tl.arange(0, PADDED_SIZE)
    has_dim = dims < VALUE_SIZE
    rest = tl.arange(0, PADDED_REST)
    # The blocks of a tile are loaded a tile ahead, so that nothing the copies of K and V wait for is loaded
    # with them, and the compiler starts as many tiles' copies ahead as it has buffers.
    block = tl.load(table + (first + in_tile) // BLOCK_SIZE, mask=first + in_tile < seq_len, other=0)
    for start in range(first, last, N):
        keys = start + in_tile
        is_key = keys < seq_len
        next_block = tl.load(table + (keys + N) // BLOCK_SIZE, mask=keys + N < seq_len, other=0)
        head_at = block.to(tl.int64) * num_kv_heads + kv_head
        if KV_FORMAT == 0:
            starts = (head_at * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_SIZE
        else:
            first_byte = head_at * (BLOCK_SIZE * (HEAD_SIZE + 4))
            starts = first_byte + keys % BLOCK_SIZE * HEAD_SIZE
            scales_at = first_byte + BLOCK_SIZE * HEAD_SIZE + keys % BLOCK_SIZE * 4
        k_at = k_cache + starts[None, :] + dims[:, None]
        v_at = v_cache + starts[:, None] + dims[None, :]
        if IS_MASKED:
            k = tl.load(k_at, mask=is_key[None, :] & has_dim[:, None], other=0.0)
        elif VALUE_SIZE == PADDED_SIZE:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=has_dim[:, None], other=0.0)
        if REST > 0:
            v = tl.trans(k)
        elif IS_MASKED:
            v = tl.load(v_at, mask=is_key[:, None] & has_dim[None, :], other=0.0)
        elif VALUE_SIZE == PADDED_SIZE:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=has_dim[None, :], other=0.0)
        if KV_FORMAT > 0:
            k_scale = _load_scales(k_cache + scales_at, is_key)  # pyright: ignore[reportPossiblyUnboundVariable]
            v_scale = k_scale
            if REST == 0:
                v_scale = _load_scales(v_cache + scales_at, is_key)  # pyright: ignore[reportPossiblyUnboundVariable]
            k = decode(k, KV_FORMAT).to(q.dtype)
            v = decode(v, KV_FORMAT)
            if q.dtype == tl.float16:  # whose small numbers lose digits: not weight times scale
                v = v * v_scale[:, None]
            v = v.to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee")
        if REST > 0:
            rest_at = k_cache + starts[None, :] + VALUE_SIZE + rest[:, None]
            if IS_MASKED or REST < PADDED_REST:
                k_rest = tl.load(rest_at, mask=is_key[None, :] & (rest < REST)[:, None], other=0.0)
            else:
                k_rest = tl.load(rest_at)
            if KV_FORMAT > 0:
                k_rest = decode(k_rest, KV_FORMAT).to(q.dtype)
            scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
        scores = scores * scale  # [M, N], of a weight the logarithm to base 2
        if KV_FORMAT > 0:
            scores = scores * k_scale[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
        if HAS_SOFT_CAP:
            # tanh(x) = 1 - 2 / (e^2x + 1); scores and cap both carry the factor log2(e).
            cap = soft_cap * 1.4426950408889634
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / soft_cap)) + 1.0))
        if HAS_BIAS:
            place = keys[None, :] - positions[:, None] + reach
            is_biased = (place >= 0) & (place <= 2 * reach)
            bias_at = bias + head[:, None] * (2 * reach + 1) + place
            scores += tl.load(bias_at, mask=is_biased, other=0.0) * 1.4426950408889634
        if IS_MASKED:
            is_seen = (keys[None, :] <= positions[:, None] + AHEAD) & is_key[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        if IS_MASKED:  # a row may have seen no key yet
            origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            origin = new_top
        weights = tl.exp2(scores - origin[:, None])
        fade = tl.exp2(top - origin)
        total = total * fade + tl.sum(weights, 1)
        if (KV_FORMAT > 0) and (q.dtype != tl.float16):
            weights = weights * v_scale[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
        top = new_top
        block = next_block
    return top, total, sums


# Numbers that vary from step to step do not make the compiler specialize.
@_jit(do_not_specialize=["num_requests", "table_stride"])
def _paged_attention_kernel(
    query: typing.Any, out: typing.Any, parts: typing.Any, part_sums: typing.Any, k_cache: typing.Any,
    v_cache: typing.Any, block_tables: typing.Any,
    query_starts: typing.Any, seq_lens: typing.Any, items: typing.Any, num_requests: typing.Any,
    scale: typing.Any, soft_cap: typing.Any, bias: typing.Any, reach: typing.Any, sinks: typing.Any,
    query_stride: typing.Any, table_stride: typing.Any, GROUP: tl.constexpr, TILES: tl.constexpr,
    VALUE_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, REST: tl.constexpr, PADDED_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr, KV_FORMAT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, IS_SINGLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Grid (items or tiles, G * TILES); GROUP heads each. A request that is not of this launch's kind is left
    to the other launch.
    """
    wait_for_inputs(USE_PDL)
    TILE_TOKENS: tl.constexpr = M // GROUP
    HEAD_SIZE: tl.constexpr = VALUE_SIZE + REST
    kv_head = tl.program_id(1) // TILES
    num_kv_heads = tl.num_programs(1) // TILES
    num_heads = tl.num_programs(1) * GROUP
    # 1. Which tokens of which request. Of a long prompt the last tiles see most keys, so they start first.
    if IS_SINGLE:
        item = tl.program_id(0)
        request = tl.load(items + item * ITEM_SIZE)
        if request >= num_requests:
            return
        split_place = tl.load(items + item * ITEM_SIZE + 1)
        num_splits = tl.load(items + item * ITEM_SIZE + 2)
        first_token = 0
        begin = tl.load(query_starts + request)
        query_len = 1
    else:
        item, split_place, num_splits = 0, 0, 1
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        request = _find_request(query_starts, tile, num_requests, TILE_TOKENS)
        begin = tl.load(query_starts + request)
        query_len = tl.load(query_starts + request + 1) - begin
        first_token = (tile - begin // TILE_TOKENS - request) * TILE_TOKENS
        if (query_len == 1) | (first_token >= query_len):
            return
    seq_len = tl.load(seq_lens + request)
    # 2. The rows: row m is token m // GROUP and head m % GROUP of the program's.
    rows = tl.arange(0, M)
    dims = tl.arange(0, PADDED_SIZE)
    token = first_token + rows // GROUP
    is_row = (rows < TILE_TOKENS * GROUP) & (token < query_len)
    head = tl.program_id(1) * GROUP + rows % GROUP
    is_element = is_row[:, None] & (dims < VALUE_SIZE)[None, :]
    out_at = ((begin + token).to(tl.int64) * num_heads + head) * VALUE_SIZE
    if seq_len == 0:
        zeros = tl.zeros([M, PADDED_SIZE], tl.float32).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + dims[None, :], zeros, mask=is_element)
        return
    # 3. The keys that some row of the tile sees, and of them the part of this program.
    first_position = seq_len - query_len + first_token
    last_key = tl.minimum(first_position + TILE_TOKENS + AHEAD, seq_len)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(0, first_position - WINDOW + 1) // N * N
    base = first_key
    split_size = tl.maximum(last_key - first_key, 1)
    if SPLIT_KEYS > 0:
        base = 0
        split_size = SPLIT_KEYS
    elif IS_SINGLE:
        split_size = tl.load(items + item * ITEM_SIZE + 3)
    first_split = (first_key - base) // split_size
    end_split = tl.cdiv(last_key - base, split_size)
    if num_splits > 1:
        first_split += split_place
        end_split = tl.minimum(end_split, first_split + 1)
    positions = first_position + rows // GROUP
    row_at = (begin + token).to(tl.int64) * query_stride + head * HEAD_SIZE
    q = tl.load(query + row_at[:, None] + dims[None, :], mask=is_element, other=0.0)
    q_rest = q
    if REST > 0:
        rest = tl.arange(0, PADDED_REST)
        rest_at = query + row_at[:, None] + VALUE_SIZE + rest[None, :]
        q_rest = tl.load(rest_at, mask=is_row[:, None] & (rest < REST)[None, :], other=0.0)
    # 4. Walk the keys; those that every row sees need no mask.
    table = block_tables + request.to(tl.int64) * table_stride
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, PADDED_SIZE], tl.float32)
    for split in range(first_split, end_split):
        split_top = tl.full([M], float("-inf"), tl.float32)
        split_total = tl.zeros([M], tl.float32)
        split_sums = tl.zeros([M, PADDED_SIZE], tl.float32)
        start = tl.maximum(base + split * split_size, first_key)
        end = tl.minimum(base + (split + 1) * split_size, last_key)
        masked_from = start
        if WINDOW == 0:
            seen_by_all = tl.minimum(first_position + AHEAD + 1, seq_len)
            masked_from = tl.maximum(start, tl.minimum(end, seen_by_all // N * N))
            split_top, split_total, split_sums = _attend_keys(
                q, q_rest, split_top, split_total, split_sums, k_cache, v_cache, table, positions,
                kv_head, num_kv_heads, start, masked_from, seq_len, scale, soft_cap,
                bias, head, reach, False, VALUE_SIZE, PADDED_SIZE, REST, PADDED_REST, BLOCK_SIZE, WINDOW,
                AHEAD, HAS_SOFT_CAP, HAS_BIAS, KV_FORMAT, N,
            )  # fmt: skip
        split_top, split_total, split_sums = _attend_keys(
            q, q_rest, split_top, split_total, split_sums, k_cache, v_cache, table, positions,
            kv_head, num_kv_heads, masked_from, end, seq_len, scale, soft_cap,
            bias, head, reach, True, VALUE_SIZE, PADDED_SIZE, REST, PADDED_REST, BLOCK_SIZE, WINDOW, AHEAD,
            HAS_SOFT_CAP, HAS_BIAS, KV_FORMAT, N,
        )  # fmt: skip
        if SPLIT_KEYS > 0:
            top, total, sums = _merge(top, total, sums, split_top, split_total, split_sums)
        else:
            top, total, sums = split_top, split_total, split_sums
    # 5. The result, or this split's part of it.
    if num_splits > 1:
        part = (item * num_heads + head).to(tl.int64)
        tl.store(parts + part[:, None] * VALUE_SIZE + dims[None, :], sums, mask=is_element)
        tl.store(part_sums + part * 2, top, mask=is_row)
        tl.store(part_sums + part * 2 + 1, total, mask=is_row)
        return
    if HAS_SINKS:
        total, sums = _add_sink(top, total, sums, tl.load(sinks + head))
    result = sums / total[:, None]
    tl.store(out + out_at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_element)


@_jit
def _combine_kernel(
    out: typing.Any, parts: typing.Any, part_sums: typing.Any, query_starts: typing.Any, items: typing.Any,
    split_items: typing.Any, sinks: typing.Any, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr, MAX_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, IS_STRICT: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Grid (requests with several splits, H): the splits of one head, in strict mode in the order of keys."""
    wait_for_inputs(USE_PDL)
    item = tl.load(split_items + tl.program_id(0))
    if item < 0:
        return
    head = tl.program_id(1)
    request = tl.load(items + item * ITEM_SIZE)
    num_splits = tl.load(items + item * ITEM_SIZE + 2)
    begin = tl.load(query_starts + request)
    dims = tl.arange(0, PADDED_SIZE)
    has_dim = dims < HEAD_SIZE
    first_part = item.to(tl.int64) * NUM_HEADS + head
    if IS_STRICT:
        single = tl.arange(0, 1)
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        sums = tl.zeros([1, PADDED_SIZE], tl.float32)
        for split in range(0, num_splits):
            part = first_part + split * NUM_HEADS + single
            part_top = tl.load(part_sums + part * 2)
            part_total = tl.load(part_sums + part * 2 + 1)
            part_at = parts + part[:, None] * HEAD_SIZE + dims[None, :]
            part_values = tl.load(part_at, mask=has_dim[None, :], other=0.0)
            top, total, sums = _merge(top, total, sums, part_top, part_total, part_values)
        if HAS_SINKS:
            total, sums = _add_sink(top, total, sums, tl.load(sinks + head + single))
        result = tl.sum(sums / total[:, None], 0)
    else:
        splits = tl.arange(0, MAX_SPLITS)
        is_split = splits < num_splits
        part = first_part + splits * NUM_HEADS
        values_at = parts + part[:, None] * HEAD_SIZE + dims[None, :]
        values = tl.load(values_at, mask=is_split[:, None] & has_dim[None, :], other=0.0)
        tops = tl.load(part_sums + part * 2, mask=is_split, other=float("-inf"))
        totals = tl.load(part_sums + part * 2 + 1, mask=is_split, other=0.0)
        top = tl.max(tops, 0)
        sink = float("-inf")
        if HAS_SINKS:
            sink = tl.load(sinks + head) * 1.4426950408889634
            top = tl.maximum(top, sink)
        weights = tl.exp2(tops - top)
        total = tl.sum(totals * weights, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - top)  # pyright: ignore[reportOperatorIssue]
        result = tl.sum(values * weights[:, None] / total, 0)
    out_at = (begin.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE + dims
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=has_dim)
