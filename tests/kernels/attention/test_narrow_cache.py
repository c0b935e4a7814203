"""Codes and scales of a KV cache in 8 bits."""

from __future__ import annotations

import pytest
import torch
from quire.kernels.attention.narrow_cache import dequantize, quantize, view_parts
from torch import Tensor

# The largest error of a number in a row whose largest is 1: half a step.
CASES = [(torch.int8, 0.5 / 127), (torch.uint8, 16.0 / 448)]


def read(codes: Tensor, scales: Tensor) -> Tensor:
    """By way of a cache of one block."""
    rows, head_size = codes.shape
    cache = torch.empty((1, 1, rows, head_size + 4), dtype=codes.dtype)
    parts = view_parts(cache)
    parts[0].copy_(codes)
    parts[1].copy_(scales)
    return dequantize(cache)[0, 0]


@pytest.mark.parametrize(("dtype", "error"), CASES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_number_is_off_by_half_a_step_at_most(dtype: torch.dtype, error: float, size: float) -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)) * size
    x[3] = 0.0
    codes, scales = quantize(x, dtype)
    largest = x.abs().amax(1, keepdim=True)
    assert ((read(codes, scales) - x).abs() <= error * (1 + 1e-6) * largest).all()
    assert not read(codes, scales)[3].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_row_goes_by_its_own_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    expected = [part[4] for part in quantize(x, dtype)]
    x[3], x[5] = 1e6, torch.nan
    codes, scales = quantize(x, dtype)
    assert torch.equal(codes[4], expected[0])
    assert scales[4] == expected[1]
    assert read(codes, scales)[5].isnan().all()
