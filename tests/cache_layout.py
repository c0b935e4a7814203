"""KV caches as the native kernels keep them, from the plain form that the references read."""

from __future__ import annotations

import torch
from quire.kernels.attention.narrow_cache import is_narrow, view_parts
from torch import Tensor


def to_native_layout(
    k_cache: Tensor, v_cache: Tensor, is_paired: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Caches [blocks, G, block_size, D] rearranged as attention_step.h says, in the same shape.

    Codes are paired where the model's numbers are: `is_paired`; their scales stay.
    """
    if is_narrow(k_cache):
        caches = k_cache.clone(), v_cache.clone()
        codes = [view_parts(cache)[0] if is_narrow(cache) else cache for cache in caches]  # latents have no V
        for part, native in zip(codes, _rearrange(codes[0], codes[1], bool(is_paired)), strict=True):
            part.copy_(native.clone())
        return caches
    return _rearrange(k_cache, v_cache, k_cache.dtype == torch.bfloat16)


def _rearrange(k_cache: Tensor, v_cache: Tensor, is_paired: bool) -> tuple[Tensor, Tensor]:
    if not is_paired:
        return k_cache.transpose(2, 3).contiguous().view(k_cache.shape), v_cache
    keys = k_cache.unflatten(3, (-1, 2)).transpose(2, 3).contiguous()
    values = v_cache.unflatten(2, (-1, 2)).transpose(3, 4).contiguous()
    return keys.view(k_cache.shape), values.view(v_cache.shape)


def from_native_layout(
    k_cache: Tensor, v_cache: Tensor, is_paired: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The plain form of what `to_native_layout` gives; codes are paired where the model's numbers are."""
    blocks, heads, block_size, head_size = k_cache.shape
    if not (k_cache.dtype == torch.bfloat16 if is_paired is None else is_paired):
        return k_cache.view(blocks, heads, head_size, block_size).transpose(2, 3).contiguous(), v_cache
    keys = k_cache.view(blocks, heads, head_size // 2, block_size, 2).transpose(2, 3).contiguous()
    values = v_cache.view(blocks, heads, block_size // 2, head_size, 2).transpose(3, 4).contiguous()
    return keys.view(k_cache.shape), values.view(v_cache.shape)
