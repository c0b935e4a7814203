"""Random narrow weights of a format, for load_format="dummy": as wide as a checkpoint's, and as fast."""

from __future__ import annotations

import torch

from ...ipc.weight_format import WeightFormat
from .integer_weight import IntegerWeight, NarrowWeight, ScaledFp8Weight

_CODEBOOK = 16


def make_dummy_weight(
    weight_format: WeightFormat, shape: tuple[int, int], std: float, seed: int
) -> NarrowWeight:
    """A weight [out, in] whose numbers have about the deviation `std`."""
    num_out, num_in = shape
    generator = torch.Generator().manual_seed(seed)
    groups = weight_format.count_groups(num_in)
    if weight_format.kind == "fp8":
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.full((-(-num_out // (weight_format.group_rows or num_out)), groups), std)
        return ScaledFp8Weight(values, scales, weight_format.group_rows, weight_format.group_size)
    bits, middle = weight_format.bits, 1 << weight_format.bits - 1
    width = num_in if bits == 8 else -(-num_in // 2)
    codes = torch.randint(0, 256, (num_out, width), generator=generator, dtype=torch.uint8)
    step = std * 12**0.5 / (2 * middle)  # of numbers spread evenly over a range
    dtype = torch.bfloat16 if weight_format.scale_dtype == "bfloat16" else torch.float32
    scales = torch.full((num_out, groups), middle * step if weight_format.has_codebook else step, dtype=dtype)
    order = torch.Generator().manual_seed(num_in)  # the same for what lies in one layer
    return IntegerWeight(
        codes,
        scales,
        bits,
        num_in,
        weight_format.group_size,
        scales.float() * middle if weight_format.has_offsets else None,
        torch.randperm(num_in, generator=order).int() if weight_format.has_permutation else None,
        torch.linspace(-1, 1, _CODEBOOK) if weight_format.has_codebook else None,
    )
