"""Norm, rotation and the write to the KV cache in one Triton kernel; formulas are in rotate_and_write.py.

One program takes some heads of one token: reads their halves once, norms and rotates queries and keys in
float32, writes queries back in place, keys and values to their slot. A block of either cache holds
[block_size, D] a kv head: a key's row is contiguous, as the attention kernel's loads want it.
Bytes: reads the T rows of qkv once, writes each of its values once. Latents have a kernel of their own.
Legend: T tokens, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import ceil_div, next_power_of_2
from .narrow_cache import END_FACTORS, find_format, find_head_size
from .rotate_and_write import QKNorm

_jit: typing.Any = triton.jit

# Heads of one program: at 8 a step of one token of an 8B model still has 6 of them.
_HEADS = 8


def launch_rotate_and_write(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    qk_norm: QKNorm | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """q of `qkv` [T, (H + 2 G) D] is normed and rotated in place, keys likewise and values are in the caches.

    `cos` and `sin` are float32 [T, D / 2], None where nothing is rotated; caches [blocks, G, block_size, D]
    or as in narrow_cache.py, all contiguous but rows of `qkv`; D is even. A negative slot is that of a row
    that pads a captured graph's batch: its key and value go nowhere.
    """
    num_kv_heads, block_size, head_size = *k_cache.shape[1:3], find_head_size(k_cache)
    query_norm, key_norm, eps, is_after = qk_norm or (qkv, qkv, 0.0, False)
    num_programs = ceil_div(num_heads + 2 * num_kv_heads, _HEADS)
    _rotate_and_write_kernel[(qkv.shape[0], num_programs)](
        qkv, qkv if cos is None else cos, qkv if sin is None else sin, query_norm, key_norm,
        k_cache, v_cache, slot_mapping, eps, HAS_ANGLES=cos is not None, HAS_NORM=qk_norm is not None,
        NORMS_AFTER=is_after, STRIDE=qkv.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_size // 2,
        PADDED_HALF=next_power_of_2(head_size // 2), BLOCK_SIZE=block_size, HEADS=_HEADS,
        KV_FORMAT=find_format(k_cache),
        num_warps=2 if head_size * qkv.element_size() <= 256 else 4, **launch_options(qkv.device),
    )  # fmt: skip


def launch_rotate_latent(
    query: Tensor,
    y: Tensor,
    latent: Tensor,
    rank: int,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """As `rotate_latent_reference`; all contiguous. A negative slot is as above."""
    high_factor, low_factor = END_FACTORS.get(k_cache.dtype, (1.0, 1.0))
    num_heads, rope = query.shape[1], latent.shape[1] - rank
    _rotate_latent_kernel[(query.shape[0], ceil_div(num_heads + 1, _HEADS))](
        query, y, latent, query if cos is None else cos, query if sin is None else sin, k_cache, slot_mapping,
        HAS_ANGLES=cos is not None, NUM_HEADS=num_heads, NOPE=query.shape[2] - rope, RANK=rank,
        PADDED_RANK=next_power_of_2(rank), HALF=rope // 2, PADDED_HALF=next_power_of_2(rope // 2),
        BLOCK_SIZE=k_cache.shape[2], KV_FORMAT=find_format(k_cache), HIGH=high_factor, LOW=low_factor,
        HEADS=_HEADS, num_warps=2, **launch_options(query.device),
    )  # fmt: skip


@_jit
def _write_heads(
    cache: typing.Any, first: typing.Any, second: typing.Any, heads: typing.Any, is_written: typing.Any,
    offset: typing.Any, dims: typing.Any, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Both halves [HEADS, D / 2] of each head to place `offset` of its block; `heads` counts over blocks."""
    mask = is_written[:, None] & (dims < HALF)[None, :]
    if KV_FORMAT == 0:
        at = cache + (heads * BLOCK_SIZE + offset)[:, None] * (HALF * 2) + dims[None, :]
        tl.store(at, first, mask=mask)
        tl.store(at + HALF, second, mask=mask)
    else:
        first = tl.where(mask, first.to(tl.float32), 0.0)
        second = tl.where(mask, second.to(tl.float32), 0.0)
        top = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        is_nan = (first != first) | (second != second)
        has_nan = tl.max(is_nan.to(tl.int32), 1) > 0  # pyright: ignore[reportOperatorIssue]
        largest = 127.0 if KV_FORMAT == 1 else 448.0
        scale = tl.where(has_nan, float("nan"), tl.maximum(tl.div_rn(top, largest), 1.1754943508222875e-38))
        start = heads * (BLOCK_SIZE * (HALF * 2 + 4))
        scale_at = cache + start + BLOCK_SIZE * HALF * 2 + offset * 4
        tl.store(scale_at.to(tl.pointer_type(tl.float32), bitcast=True), scale, mask=is_written)
        at = cache + (start + offset * (HALF * 2))[:, None] + dims[None, :]
        tl.store(at, _encode(tl.div_rn(first, scale[:, None]), KV_FORMAT), mask=mask)
        tl.store(at + HALF, _encode(tl.div_rn(second, scale[:, None]), KV_FORMAT), mask=mask)


@_jit
def _encode(x: typing.Any, KV_FORMAT: tl.constexpr) -> typing.Any:
    """Codes of numbers up to the largest code; to the nearest, ties to even."""
    if KV_FORMAT == 1:
        codes = ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: its sum with x is whole
    else:
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        whole = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # three digits; e4m3 has an exponent less by 120
        small = ((tl.abs(x) + 16384.0) - 16384.0) * 512.0  # below 2^-6 a step is 2^-9
        codes = tl.where(tl.abs(x) < 0.015625, small.to(tl.int32), whole - 960)
        codes = (codes | tl.where(x < 0, 128, 0)).to(tl.uint8)
    return codes


@_jit
def decode(codes: typing.Any, KV_FORMAT: tl.constexpr) -> typing.Any:
    """float32 of a cache's codes."""
    if KV_FORMAT == 1:
        numbers = codes.to(tl.float32)
    else:  # a half with the same digits has an exponent that is less by 8
        bits = codes.to(tl.uint16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers


@_jit
def _rotate_and_write_kernel(
    qkv: typing.Any, cos: typing.Any, sin: typing.Any, query_norm: typing.Any, key_norm: typing.Any,
    k_cache: typing.Any, v_cache: typing.Any,
    slot_mapping: typing.Any, eps: typing.Any, HAS_ANGLES: tl.constexpr, HAS_NORM: tl.constexpr,
    NORMS_AFTER: tl.constexpr, STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    KV_FORMAT: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Grid (T, groups of HEADS heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_HALF)
    has_dim = dims < HALF
    is_query = heads < NUM_HEADS
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & has_dim[None, :]
    row = qkv + token * STRIDE
    at = row + heads[:, None] * (HALF * 2) + dims[None, :]
    if HAS_NORM:
        weight_at = tl.where(is_key[:, None], key_norm + dims[None, :], query_norm + dims[None, :])
        first_weight = tl.load(weight_at, mask=has_dim[None, :], other=0.0).to(tl.float32)
        second_weight = tl.load(weight_at + HALF, mask=has_dim[None, :], other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)
    stored_first = tl.load(at, mask=mask, other=0.0)
    stored_second = tl.load(at + HALF, mask=mask, other=0.0)
    first = stored_first.to(tl.float32)
    second = stored_second.to(tl.float32)
    if HAS_ANGLES:
        cos_row = tl.load(cos + token * HALF + dims, mask=has_dim, other=0.0)[None, :]
        sin_row = tl.load(sin + token * HALF + dims, mask=has_dim, other=0.0)[None, :]
    if HAS_ANGLES and NORMS_AFTER:
        turned = (first * cos_row - second * sin_row).to(qkv.dtype.element_ty).to(tl.float32)  # pyright: ignore[reportPossiblyUnboundVariable]
        second = (second * cos_row + first * sin_row).to(qkv.dtype.element_ty).to(tl.float32)  # pyright: ignore[reportPossiblyUnboundVariable]
        first = turned
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / (HALF * 2) + eps)[:, None]
        # The normed value is rounded before the weight multiplies it, and their product after.
        kind = qkv.dtype.element_ty
        first = (first * factor).to(kind).to(tl.float32)
        first = (first * first_weight).to(kind).to(tl.float32)  # pyright: ignore[reportPossiblyUnboundVariable]
        second = (second * factor).to(kind).to(tl.float32)
        second = (second * second_weight).to(kind).to(tl.float32)  # pyright: ignore[reportPossiblyUnboundVariable]
    if HAS_ANGLES and not NORMS_AFTER:
        rotated_first = (first * cos_row - second * sin_row).to(qkv.dtype.element_ty)  # pyright: ignore[reportPossiblyUnboundVariable]
        rotated_second = (second * cos_row + first * sin_row).to(qkv.dtype.element_ty)  # pyright: ignore[reportPossiblyUnboundVariable]
    else:
        rotated_first = first.to(qkv.dtype.element_ty)
        rotated_second = second.to(qkv.dtype.element_ty)
    query_mask = is_query[:, None] & has_dim[None, :]
    tl.store(at, rotated_first, mask=query_mask)
    tl.store(at + HALF, rotated_second, mask=query_mask)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        first_head = slot // BLOCK_SIZE * NUM_KV_HEADS - NUM_HEADS
        _write_heads(
            k_cache, rotated_first, rotated_second, first_head + heads, is_key, slot % BLOCK_SIZE, dims, HALF,
            BLOCK_SIZE, KV_FORMAT,
        )  # fmt: skip
        _write_heads(
            v_cache, stored_first, stored_second, first_head - NUM_KV_HEADS + heads, is_value,
            slot % BLOCK_SIZE, dims, HALF, BLOCK_SIZE, KV_FORMAT,
        )  # fmt: skip


@_jit
def _write_ends(
    at: typing.Any, ratio: typing.Any, mask: typing.Any, HIGH: tl.constexpr, LOW: tl.constexpr,
    HALF: tl.constexpr, KV_FORMAT: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Both codes of half of a latent's rotated numbers over its scale."""
    high = _encode(ratio / HIGH, KV_FORMAT)
    tl.store(at, high, mask=mask)
    low = (ratio - decode(high, KV_FORMAT) * HIGH) / LOW
    tl.store(at + HALF * 2, _encode(low, KV_FORMAT), mask=mask)


@_jit
def _rotate_latent_kernel(
    query: typing.Any, y: typing.Any, latent: typing.Any, cos: typing.Any, sin: typing.Any,
    k_cache: typing.Any, slot_mapping: typing.Any, HAS_ANGLES: tl.constexpr, NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr, HIGH: tl.constexpr,
    LOW: tl.constexpr, HEADS: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Grid (T, groups of HEADS heads); the latent's end counts as the last head."""
    wait_for_inputs(USE_PDL)
    SIZE: tl.constexpr = RANK + HALF * 2
    KEY_SIZE: tl.constexpr = SIZE if KV_FORMAT == 0 else RANK + HALF * 4
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_HALF)
    is_query = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    is_latent = (heads == NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    rows = token * NUM_HEADS + heads
    query_at = query + (rows * (NOPE + HALF * 2) + NOPE)[:, None] + dims[None, :]
    latent_at = latent + (token * SIZE + RANK) + (heads - heads)[:, None] + dims[None, :]
    at = tl.where(is_latent, latent_at, query_at)
    first = tl.load(at, mask=is_query | is_latent, other=0.0)
    second = tl.load(at + HALF, mask=is_query | is_latent, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if HAS_ANGLES:
        cos_row = tl.load(cos + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
        sin_row = tl.load(sin + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
        first = (a * cos_row - b * sin_row).to(y.dtype.element_ty)
        second = (b * cos_row + a * sin_row).to(y.dtype.element_ty)
    y_at = y + (rows * KEY_SIZE + RANK)[:, None] + dims[None, :]
    if KV_FORMAT == 0:
        tl.store(y_at, first, mask=is_query)
        tl.store(y_at + HALF, second, mask=is_query)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)  # rounded by now
        tl.store(y_at, (a * HIGH).to(first.dtype), mask=is_query)
        tl.store(y_at + HALF, (b * HIGH).to(first.dtype), mask=is_query)
        tl.store(y_at + HALF * 2, (a * LOW).to(first.dtype), mask=is_query)
        tl.store(y_at + HALF * 3, (b * LOW).to(first.dtype), mask=is_query)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        tl.store(latent_at, first, mask=is_latent)
        tl.store(latent_at + HALF, second, mask=is_latent)
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            in_rank = tl.arange(0, PADDED_RANK)
            numbers = tl.load(latent + token * SIZE + in_rank, mask=in_rank < RANK, other=0.0)
            to = k_cache + slot * KEY_SIZE
            if KV_FORMAT > 0:
                start = slot // BLOCK_SIZE * (BLOCK_SIZE * (KEY_SIZE + 4))
                to = k_cache + start + slot % BLOCK_SIZE * KEY_SIZE
                scale_at = k_cache + start + BLOCK_SIZE * KEY_SIZE + slot % BLOCK_SIZE * 4
            end_at = to + RANK + (heads - heads)[:, None] + dims[None, :]
            if KV_FORMAT == 0:
                tl.store(to + in_rank, numbers, mask=in_rank < RANK)
                tl.store(end_at, first, mask=is_latent)
                tl.store(end_at + HALF, second, mask=is_latent)
            else:
                numbers = numbers.to(tl.float32)
                a = tl.where(is_latent, first.to(tl.float32), 0.0)
                b = tl.where(is_latent, second.to(tl.float32), 0.0)
                largest = 127.0 if KV_FORMAT == 1 else 448.0
                end_top = tl.max(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1), 0)
                top = tl.maximum(tl.max(tl.abs(numbers), 0), end_top / HIGH)
                nans = tl.sum((numbers != numbers).to(tl.int32), 0)
                nans += tl.sum(tl.sum(((a != a) | (b != b)).to(tl.int32), 1), 0)
                scale = tl.maximum(tl.div_rn(top, largest), 1.1754943508222875e-38)
                scale = tl.where(nans > 0, float("nan"), scale)  # pyright: ignore[reportOperatorIssue]
                tl.store(scale_at.to(tl.pointer_type(tl.float32), bitcast=True), scale)  # pyright: ignore[reportPossiblyUnboundVariable]
                tl.store(to + in_rank, _encode(tl.div_rn(numbers, scale), KV_FORMAT), mask=in_rank < RANK)
                _write_ends(end_at, tl.div_rn(a, scale), is_latent, HIGH, LOW, HALF, KV_FORMAT)
                _write_ends(end_at + HALF, tl.div_rn(b, scale), is_latent, HIGH, LOW, HALF, KV_FORMAT)
