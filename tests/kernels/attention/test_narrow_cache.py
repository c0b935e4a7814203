"""Codes and scales of a KV cache in 8 bits."""

from __future__ import annotations

import pytest
import torch
from quire.kernels.attention.narrow_cache import (
    dequantize,
    quantize,
    quantize_latent,
    spread_ends,
    view_parts,
)
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


@pytest.mark.parametrize(("dtype", "largest"), [(torch.int8, 127), (torch.uint8, 448)])
@pytest.mark.parametrize("size", [0.0, 0.01, 1.0, 100.0, 1000.0])
def test_rotated_numbers_of_a_latent_leave_the_others_their_steps(
    dtype: torch.dtype, largest: int, size: float
) -> None:
    rank, rope = 32, 8
    x = torch.randn(64, rank + rope, generator=torch.Generator().manual_seed(0))
    x[:, rank:] *= size
    codes, scales = quantize_latent(x, rank, dtype)
    query = torch.ones(rope)
    by_factors = spread_ends(query, codes).view(2, rope)
    numbers = read(codes, scales)
    ends = (numbers[:, rank:].unflatten(1, (2, rope)) * by_factors).sum(1)
    first, rotated, step = x[:, :rank], x[:, rank:], scales.unsqueeze(1)
    top, end_top = (part.abs().amax(1, keepdim=True) for part in (first, rotated))
    assert (
        step <= torch.maximum(top, end_top / (128 if dtype == torch.int8 else 1)) / largest * 1.00001
    ).all()
    # Of int8 half a step; of fp8 3 digits are kept of a number, then 3 of what is left, or fixed steps.
    bound = step / 2 if dtype == torch.int8 else torch.maximum(first.abs() / 16, step / 1024)
    assert ((numbers[:, :rank] - first).abs() <= bound * 1.00001).all()
    bound = step / 2 if dtype == torch.int8 else torch.maximum(rotated.abs() / 256, step / 2**14)
    assert ((ends - rotated).abs() <= bound * 1.00001).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_row_goes_by_its_own_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    expected = [part[4] for part in quantize(x, dtype)]
    x[3], x[5] = 1e6, torch.nan
    codes, scales = quantize(x, dtype)
    assert torch.equal(codes[4], expected[0])
    assert scales[4] == expected[1]
    assert read(codes, scales)[5].isnan().all()
