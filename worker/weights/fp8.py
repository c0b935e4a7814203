"""float8 e4m3 with a scale for the whole weight, each output, or each block; activations stay as they are.

Sources: transformers' finegrained_fp8 (weight_scale_inv is multiplied with, name notwithstanding), vLLM's
fp8 and fbgemm_fp8, compressed-tensors' float-quantized.
"""

from __future__ import annotations

import torch

from ...ipc.spec.weight_format import WeightFormat
from .compressed_tensors import ACTIVATION_PARTS
from .integer_weight import ScaledFp8Weight
from .stored_tensors import StoredTensors, grid_shapes, spread

_EXPONENTS = (torch.float8_e8m0fnu, torch.uint8)  # of scales that are powers of two


def read_fp8(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> ScaledFp8Weight:
    """Blocks have `weight_scale_inv`, as has a whole weight by transformers; the rest `weight_scale`."""
    is_block = weight_format.group_rows != 1 or weight_format.group_size != 0
    has_inverse = is_block or tensors.has("weight_scale_inv")
    tensors.skip("input_scale", "input_scale_ub", "activation_scale")
    return _read(tensors, weight_format, shape, "weight_scale_inv" if has_inverse else "weight_scale")


def read_compressed_fp8(
    tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]
) -> ScaledFp8Weight:
    """All have `weight_scale`."""
    tensors.skip("weight_zero_point", *ACTIVATION_PARTS)
    return _read(tensors, weight_format, shape, "weight_scale")


def _read(
    tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int], part: str
) -> ScaledFp8Weight:
    num_out, num_in = shape
    values = tensors.take("weight", [torch.float8_e4m3fn], shape)
    rows = -(-num_out // (weight_format.group_rows or num_out))
    grid = (rows, weight_format.count_groups(num_in))
    exponents = tensors.peek(part, _EXPONENTS, *grid_shapes(grid))
    if exponents is None:
        scales = tensors.take_grid(part, grid)
    else:
        tensors.skip(part)
        scales = spread(tensors.read_exponents(part, exponents), grid)
    return ScaledFp8Weight(values, scales, weight_format.group_rows, weight_format.group_size)
