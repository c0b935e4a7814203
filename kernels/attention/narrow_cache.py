"""The KV cache in 8 bits: codes of a token's keys and values, and a scale for each head of either.

A key or value x [D] becomes round(x / s), to the nearest and ties to even, with s = max |x| / L; L is the
largest code, 127 of int8 and 448 of float8_e4m3fn. Codes and scale are a function of x alone, so a token's
bits are the same in any step. A NaN makes the scale NaN.

A cache is [blocks, G, block_size, D + 4] of int8, or of uint8 that are float8_e4m3fn's bits. The bytes of a
block's head are codes [block_size, D], then scales [block_size] in float32: kernels multiply by them as they
are, and bfloat16 would save 1.5 % of the bytes at D = 128. They lie beside their codes, so that a head's
block is one run of memory.

A latent x [rank + rope] (values are its first `rank` numbers) ends in rotated numbers, which may be far
larger than the others and would leave them few steps: with two that are 200 times as large int8's scores,
of deviation 1, are off by 0.80. So each of these is two codes with factors F and f, x / s ~ F high + f low,
and s = max(max |first|, max |rotated| / F) / L: F, f = 128, 1 of int8, 1, 1/16 of float8_e4m3fn; scores are
then off by 0.014. D is rank + 2 rope; queries have their rotated numbers twice, times F and times f.
Legend: T tokens, G kv heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_SIZE = 4  # bytes
KV_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}  # by kv_cache_dtype
_LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
END_FACTORS = {torch.int8: (128.0, 1.0), torch.uint8: (1.0, 1 / 16)}  # (F, f)
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
    return _encode(x / scale.unsqueeze(-1), dtype), scale


def quantize_latent(x: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [..., rank + 2 rope] and scales float32 [...] of latents [..., rank + rope]."""
    x, (high_factor, low_factor) = x.float(), END_FACTORS[dtype]
    first, rotated = x[..., :rank], x[..., rank:]
    top = torch.maximum(first.abs().amax(-1), rotated.abs().amax(-1) / high_factor)
    scale = (top / _LARGEST[dtype]).clamp(min=_LEAST_SCALE)
    ratio = rotated / scale.unsqueeze(-1)
    high = _encode(ratio / high_factor, dtype)
    low = _encode((ratio - _decode(high) * high_factor) / low_factor, dtype)
    return torch.cat([_encode(first / scale.unsqueeze(-1), dtype), high, low], -1), scale


def spread_ends(rotated: Tensor, cache: Tensor) -> Tensor:
    """Rotated numbers [..., rope] of queries as products with latents of this cache take them."""
    if not is_narrow(cache):
        return rotated
    return torch.cat([rotated * factor for factor in END_FACTORS[cache.dtype]], -1)


def _encode(ratio: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return ratio.round().to(dtype)
    return ratio.to(torch.float8_e4m3fn).view(dtype)


def _decode(codes: Tensor) -> Tensor:
    return (codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)).float()


def dequantize(cache: Tensor) -> Tensor:
    """float32 [blocks, G, block_size, D]"""
    codes, scales = view_parts(cache)
    return _decode(codes) * scales.unsqueeze(-1)


def make_narrow(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache of numbers as one of codes of such a type; for benches and tests."""
    narrow = cache.new_empty((*cache.shape[:3], cache.shape[3] + SCALE_SIZE), dtype=dtype)
    for part, quantized in zip(view_parts(narrow), quantize(cache, dtype), strict=True):
        part.copy_(quantized)
    return narrow
