"""compressed-tensors' integer formats and mxfp4. What is kept of activations, which stay plain, is skipped.

Source: the compressors of compressed-tensors 0.20.0. Words run along the inputs, those of zeros along the
outputs, and both hold value + 2^(bits - 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.spec.weight_format import WeightFormat
from .integer_weight import IntegerWeight
from .packed_bits import count_words, make_weight, make_weight_of_words, sort_by_group, unpack_words
from .stored_tensors import StoredTensors, grid_shapes, spread

ACTIVATION_PARTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")
# mxfp4 (OCP Microscaling): e2m1 numbers, the first of a pair in the low half, 2^(e - 127) for each group.
GROUP_SIZE = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])


def make_mxfp4_weight(packed: Tensor, scales: Tensor) -> IntegerWeight:
    """Of bytes [out, in / 2] and powers of two [out, in / 32], which bfloat16 holds."""
    packed, num_in = packed.contiguous(), 2 * packed.shape[1]
    return IntegerWeight(packed, scales.bfloat16(), 4, num_in, GROUP_SIZE, codebook=MXFP4_NUMBERS)


def read_pack_quantized(
    tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]
) -> IntegerWeight:
    """The layout is "pack-quantized/bits"."""
    bits, (num_out, num_in) = int((weight_format.layout or "").partition("/")[2]), shape
    groups = weight_format.count_groups(num_in)
    words = tensors.take("weight_packed", [torch.int32], (num_out, count_words(num_in, bits)))
    scales = tensors.take_grid("weight_scale", (num_out, groups))
    stored_shape = tensors.find("weight_shape", [torch.int64, torch.int32], (2,))
    if stored_shape is not None and stored_shape.tolist() != [num_out, num_in]:
        raise tensors.error("weight_shape", stored_shape.tolist(), f"{[num_out, num_in]} by config.json")
    zeros = _read_packed_zeros(tensors, weight_format, bits, (num_out, groups))
    if zeros is not None and not weight_format.has_offsets:
        _check_neutral(tensors, zeros - (1 << bits - 1))
        zeros = None
    permutation = _read_order(tensors, weight_format, num_in)
    tensors.skip(*ACTIVATION_PARTS)
    size = weight_format.group_size
    return make_weight_of_words(words, scales, bits, num_in, size, zeros, permutation)


def _read_packed_zeros(
    tensors: StoredTensors, weight_format: WeightFormat, bits: int, grid: tuple[int, int]
) -> Tensor | None:
    """float32 [out, groups]. That of a whole weight is not packed, nor need those of symmetric weights be."""
    plain = tensors.peek("weight_zero_point", [torch.int8], *grid_shapes(grid))
    if plain is not None:
        tensors.skip("weight_zero_point")
        return spread(plain, grid).float() + (1 << bits - 1)
    find = tensors.take if weight_format.has_offsets else tensors.find
    words = find("weight_zero_point", [torch.int32], (count_words(grid[0], bits), grid[1]))
    return None if words is None else unpack_words(words.T, bits, grid[0]).T.contiguous().float()


def _read_order(tensors: StoredTensors, weight_format: WeightFormat, num_in: int) -> Tensor | None:
    find = tensors.take if weight_format.has_permutation else tensors.find
    group_of = find("weight_g_idx", [torch.int32, torch.int64], (num_in,))
    if group_of is None or bool((group_of == -1).all()):  # which the library does not use
        return None
    try:
        permutation = sort_by_group(group_of, weight_format.group_size or num_in)
    except ValueError as error:
        raise tensors.error("weight_g_idx", "other groups", str(error)) from None
    if permutation is not None and not weight_format.has_permutation:
        raise tensors.error("weight_g_idx", "not in order", "in order, as actorder in config.json says")
    return permutation


def read_int_quantized(
    tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]
) -> IntegerWeight:
    """int8, a value of up to 8 bits in each."""
    grid = (shape[0], weight_format.count_groups(shape[1]))
    codes = to_unsigned(tensors.take("weight", [torch.int8], shape))
    scales = tensors.take_grid("weight_scale", grid)
    find = tensors.take if weight_format.has_offsets else tensors.find
    point, zeros = find("weight_zero_point", [torch.int8], *grid_shapes(grid)), None
    if point is not None and weight_format.has_offsets:
        zeros = spread(point, grid).float() + 128
    elif point is not None:
        _check_neutral(tensors, point)
    tensors.skip(*ACTIVATION_PARTS)
    return make_weight(codes, scales, 8, weight_format.group_size, zeros)


def _check_neutral(tensors: StoredTensors, zeros: Tensor) -> None:
    """ModelError where symmetric weights have a zero that is none."""
    if bool(zeros.any()):
        raise tensors.error("weight_zero_point", "another zero", "0 as symmetric=true in config.json says")


def read_mxfp4(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
    """e2m1 numbers, two in a byte, and an exponent for each 32."""
    num_out, num_in = shape
    packed = tensors.take("weight_packed", [torch.uint8], (num_out, num_in // 2))
    exponents = tensors.take("weight_scale", [torch.uint8], (num_out, weight_format.count_groups(num_in)))
    tensors.skip(*ACTIVATION_PARTS)
    return make_mxfp4_weight(packed, tensors.read_exponents("weight_scale", exponents))


def read_mxfp4_blocks(
    tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]
) -> IntegerWeight:
    """The same as gpt-oss keeps them: the bytes of each 32 numbers along one more dimension."""
    num_out, groups = shape[0], weight_format.count_groups(shape[1])
    blocks = tensors.take("blocks", [torch.uint8], (num_out, groups, GROUP_SIZE // 2))
    exponents = tensors.take("scales", [torch.uint8], (num_out, groups))
    return make_mxfp4_weight(blocks.flatten(1), tensors.read_exponents("scales", exponents))


def to_unsigned(values: Tensor) -> Tensor:
    """int8 as uint8, 128 more."""
    return values.contiguous().view(torch.uint8) ^ 128
