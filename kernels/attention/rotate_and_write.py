"""Between the fused projection and attention: norm q and k by head (some models), rotate them, write k and v.

Rotation (RoFormer, arXiv 2104.09864, halves instead of pairs): with x = (a, b) split in the middle,
(a cos - b sin, b cos + a sin). K and V go to the slots of the paged cache; a slot is
block * block_size + offset. Bytes: reads and writes the T rows of qkv, writes K and V once more.
Legend: T tokens, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..norm.rms_norm import rms_norm_reference
from .narrow_cache import (
    find_format,
    find_head_size,
    is_narrow,
    quantize,
    quantize_latent,
    spread_ends,
    view_parts,
)


class QKNorm(NamedTuple):
    """Weights [D] of the norms of query and key heads, their epsilon, and whether rotation goes before."""

    query: Tensor
    key: Tensor
    eps: float
    is_after: bool = False


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] rotated by the angles of each token, given as cos and sin float32 [T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos = cos.to(x.dtype).unsqueeze(1)
    sin = sin.to(x.dtype).unsqueeze(1)
    rotated = x.new_empty(x.shape)
    half = x.shape[-1] // 2
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half:] = second * cos + first * sin
    return rotated


def write_kv_reference(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key and value [T, G, D] to their slots of caches as `paged_attention_reference` takes them."""
    blocks, offsets = slot_mapping // k_cache.shape[2], slot_mapping % k_cache.shape[2]
    for x, cache in ((key, k_cache), (value, v_cache)):
        if is_narrow(cache):
            codes, scales = view_parts(cache)
            codes[blocks, :, offsets], scales[blocks, :, offsets] = quantize(x, cache.dtype)
        else:
            cache[blocks, :, offsets] = x.to(cache.dtype)


def rotate_and_write_reference(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    qk_norm: QKNorm | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """The queries [T, H, D], normed and rotated; keys likewise and values are in the caches afterwards.

    `qkv` is [T, (H + 2 G) D]. Without `cos` and `sin` nothing is rotated.
    """
    num_kv_heads, head_size = k_cache.shape[1], find_head_size(k_cache)
    query, key, value = qkv.unflatten(1, (-1, head_size)).split(
        (num_heads, num_kv_heads, num_kv_heads), dim=1
    )
    if qk_norm is not None and not qk_norm.is_after:
        query = rms_norm_reference(query, qk_norm.query, qk_norm.eps)
        key = rms_norm_reference(key, qk_norm.key, qk_norm.eps)
    if cos is not None and sin is not None:
        query, key = rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)
    if qk_norm is not None and qk_norm.is_after:
        query = rms_norm_reference(query, qk_norm.query, qk_norm.eps)
        key = rms_norm_reference(key, qk_norm.key, qk_norm.eps)
    write_kv_reference(key, value, k_cache, v_cache, slot_mapping)
    return query


def launch_rotate_and_write(
    library: ctypes.CDLL,
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    qk_norm: QKNorm | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """The same in place: q and k of `qkv` are normed and rotated afterwards.

    A block of `k_cache` then holds [D, block_size] in its bytes (not [block_size, D]), as the native
    attention kernel reads it; in bfloat16 neighbours are paired: K [D / 2, block_size, 2] and
    V [block_size / 2, D, 2]. Codes of 8 bits lie as the
    model's numbers would. All contiguous on the CPU but rows of `qkv`; qkv, norms and caches of one type.
    """
    num_kv_heads, block_size, head_size = *k_cache.shape[1:3], find_head_size(k_cache)
    query_norm, key_norm, eps, is_after = qk_norm or (None, None, 0.0, False)
    library.quire_rotate_and_write(
        *(
            qkv.dtype is torch.bfloat16,
            qkv,
            len(qkv),
            qkv.stride(0),
            cos,
            sin,
            query_norm,
            key_norm,
            eps,
            is_after,
        ),
        *(k_cache, v_cache, slot_mapping, num_heads, num_kv_heads, head_size, block_size),
        find_format(k_cache),
    )


def rotate_latent_reference(
    query: Tensor,
    y: Tensor,
    latent: Tensor,
    rank: int,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Of latent attention: the ends of each query and of the latent are rotated, and the latent is written.

    `query` is [T, H, nope + rope], `y` [T, H, rank + rope], whose first `rank` numbers of a head are left
    alone, and `latent` [T, rank + rope], normed already; cos and sin are [T, rope / 2], None where nothing
    is rotated, and the cache is [blocks, 1, block_size, rank + rope]. With a cache of 8 bits, as in
    narrow_cache.py, `y` is [T, H, rank + 2 rope].
    """
    nope = query.shape[2] - (latent.shape[1] - rank)
    query_end, latent_end = query[..., nope:], latent[:, None, rank:]
    if cos is not None and sin is not None:
        query_end, latent_end = (rotate_reference(x, cos, sin) for x in (query_end, latent_end))
    y[..., rank:] = spread_ends(query_end, k_cache)
    latent[:, rank:] = latent_end.squeeze(1)
    block_size = k_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    if is_narrow(k_cache):
        codes, scales = view_parts(k_cache)
        codes[blocks, 0, offsets], scales[blocks, 0, offsets] = quantize_latent(latent, rank, k_cache.dtype)
    else:
        k_cache[blocks, 0, offsets] = latent


def launch_rotate_latent(
    library: ctypes.CDLL,
    query: Tensor,
    y: Tensor,
    latent: Tensor,
    rank: int,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """The same on the CPU; the cache's blocks lie as `launch_rotate_and_write` leaves those of keys."""
    num_heads, rope = query.shape[1], latent.shape[1] - rank
    library.quire_rotate_latent(
        *(query.dtype is torch.bfloat16, query, y, latent, len(query), cos, sin, k_cache, slot_mapping),
        *(num_heads, query.shape[2] - rope, rope, rank, k_cache.shape[2], find_format(k_cache)),
    )
