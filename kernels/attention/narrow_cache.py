"""The KV cache in 8 bits: codes of a token's keys and values, and a scale for each head of either.

A key or value x [D] becomes round(x / s), to the nearest and ties to even, with s = max |x| / L; L is the
largest code, 127 of int8 and 448 of float8_e4m3fn. Codes and scale are a function of x alone, so a token's
bits are the same in any step. A NaN makes the scale NaN.

A cache is [blocks, G, block_size, D + 4] of int8, or of uint8 that are float8_e4m3fn's bits. The bytes of a
block's head are codes [block_size, D], then scales [block_size] in float32: kernels multiply by them as they
are, and bfloat16 would save 1.5 % of the bytes at D = 128. They lie beside their codes, so that a head's
block is one run of memory.
Legend: T tokens, G kv heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_SIZE = 4  # bytes
KV_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}  # by kv_cache_dtype
_LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a key that is 0; smaller scales would lose digits


def is_narrow(cache: Tensor) -> bool:
    """Whether it holds codes."""
    return cache.dtype in _LARGEST


def find_format(cache: Tensor) -> int:
    """As attention/narrow_cache.h numbers them: 0 the model's type, 1 int8, 2 float8_e4m3fn."""
    return {torch.int8: 1, torch.uint8: 2}.get(cache.dtype, 0)


def find_head_size(cache: Tensor) -> int:
    """D."""
    return cache.shape[3] - SCALE_SIZE * is_narrow(cache)


def view_parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Its codes [blocks, G, block_size, D] and scales float32 [blocks, G, block_size], as views."""
    blocks, num_kv_heads, block_size, width = cache.shape
    size = block_size * (width - SCALE_SIZE)
    flat = cache.view(blocks, num_kv_heads, block_size * width)
    return flat[..., :size].unflatten(2, (block_size, -1)), flat[..., size:].view(torch.float32)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [..., D] of a cache's type and scales float32 [...] of x [..., D]."""
    x = x.float()
    scale = (x.abs().amax(-1) / _LARGEST[dtype]).clamp(min=_LEAST_SCALE)
    ratio = x / scale.unsqueeze(-1)
    if dtype == torch.int8:
        return ratio.round().to(dtype), scale
    return ratio.to(torch.float8_e4m3fn).view(dtype), scale


def dequantize(cache: Tensor) -> Tensor:
    """float32 [blocks, G, block_size, D]"""
    codes, scales = view_parts(cache)
    wide = codes if cache.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return wide.float() * scales.unsqueeze(-1)


def make_narrow(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache of numbers as one of codes of such a type; for benches and tests."""
    narrow = cache.new_empty((*cache.shape[:3], cache.shape[3] + SCALE_SIZE), dtype=dtype)
    for part, quantized in zip(view_parts(narrow), quantize(cache, dtype), strict=True):
        part.copy_(quantized)
    return narrow
