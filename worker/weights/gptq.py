"""GPTQ, versions 1 and 2: words run along the inputs, zeros along the outputs; g_idx: the group of an input.

value = (code - zero) * scale, and version 1 keeps zero - 1. Sources: the pack methods of AutoGPTQ 0.7.1 and
GPTQModel 7.7.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.spec.weight_format import WeightFormat
from .integer_weight import IntegerWeight
from .packed_bits import count_words, make_weight_of_words, sort_by_group, unpack_words
from .stored_tensors import StoredTensors


def read_gptq(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
    """The layout is "gptq/bits" or "gptq_v2/bits"."""
    version, _, stored_bits = (weight_format.layout or "").partition("/")
    bits, (num_out, num_in) = int(stored_bits), shape
    groups = weight_format.count_groups(num_in)
    words = tensors.take("qweight", [torch.int32], (count_words(num_in, bits), num_out))
    scales = tensors.take_scales("scales", (groups, num_out)).T.contiguous()
    zeros = _read_zeros(tensors, bits, groups, num_out) + (1 if version == "gptq" else 0)
    if not weight_format.has_offsets and bool((zeros != 1 << bits - 1).any()):
        raise tensors.error("qzeros", "another zero", f"{1 << bits - 1} as sym=true in config.json says")
    permutation = _read_order(tensors, weight_format, num_in)
    _skip_empty_bias(tensors, num_out)
    shifts = zeros.T.contiguous().float() if weight_format.has_offsets else None
    size = weight_format.group_size
    return make_weight_of_words(words.T, scales, bits, num_in, size, shifts, permutation)


def _read_zeros(tensors: StoredTensors, bits: int, groups: int, num_out: int) -> Tensor:
    words = tensors.take("qzeros", [torch.int32], (groups, count_words(num_out, bits)))
    return unpack_words(words, bits, num_out).int()


def _read_order(tensors: StoredTensors, weight_format: WeightFormat, num_in: int) -> Tensor | None:
    group_of = tensors.find("g_idx", [torch.int32, torch.int64], (num_in,))
    if group_of is None or weight_format.group_size == 0:
        return None
    try:
        permutation = sort_by_group(group_of, weight_format.group_size)
    except ValueError as error:
        raise tensors.error("g_idx", "other groups", str(error)) from None
    if permutation is not None and not weight_format.has_permutation:
        raise tensors.error("g_idx", "not in order", "in order, as desc_act=false in config.json says")
    return permutation


def _skip_empty_bias(tensors: StoredTensors, num_out: int) -> None:
    """AutoGPTQ writes a bias of zeros where the model has none."""
    types = [torch.float16, torch.bfloat16, torch.float32]
    bias = tensors.peek("bias", types, (num_out,))
    if bias is not None and not bool(bias.any()):
        tensors.skip("bias")
