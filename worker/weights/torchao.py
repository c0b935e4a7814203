"""torchao's plain tensors in safetensors: Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor.

Source: torchao 0.18.0, prototype.safetensors. All keep a number a value, `_weight_qdata` [out, in].
"""

from __future__ import annotations

import torch

from ...ipc.spec.weight_format import WeightFormat
from .compressed_tensors import to_unsigned
from .integer_weight import NarrowWeight, ScaledFp8Weight
from .packed_bits import make_weight
from .stored_tensors import StoredTensors, spread

_ZERO_TYPES = (torch.int8, torch.float32, torch.bfloat16, torch.float16)


def read_torchao(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> NarrowWeight:
    """The layout is "torchao/bits"; of float8 the bits say nothing."""
    grid = (shape[0], weight_format.count_groups(shape[1]))
    shapes = [grid, *([(1, 1), ()] if grid[1] == 1 else [])]
    tensors.skip("_weight_act_quant_scale", "_weight_act_quant_zero_point")
    scales = spread(tensors.take_scales("_weight_scale", *shapes), grid)
    if weight_format.kind == "fp8":
        values = tensors.take("_weight_qdata", [torch.float8_e4m3fn], shape)
        return ScaledFp8Weight(values, scales, weight_format.group_rows, weight_format.group_size)
    bits = int((weight_format.layout or "").partition("/")[2])
    middle = 1 << bits - 1
    values = tensors.take("_weight_qdata", [torch.int8], shape)
    if bits < 8 and bool(((values < -middle) | (values >= middle)).any()):
        raise tensors.error("_weight_qdata", "larger values", f"from {-middle} to {middle - 1}")
    codes = to_unsigned(values) if bits == 8 else (values + middle).view(torch.uint8)
    find = tensors.take if weight_format.has_offsets else tensors.find
    point, zeros = find("_weight_zero_point", _ZERO_TYPES, *shapes), None
    if point is not None and weight_format.has_offsets:
        point = tensors.check_scales("_weight_zero_point", point.float())
        zeros = spread(point, grid) + middle
    elif point is not None and bool(point.any()):
        raise tensors.error("_weight_zero_point", "another zero", "0 as config.json says")
    return make_weight(codes, scales, bits, weight_format.group_size, zeros)
