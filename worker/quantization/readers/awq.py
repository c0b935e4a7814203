"""AWQ, version gemm: a row an input, in whose words the outputs stand in an order of their own.

Source: WQLinear_GEMM of AutoAWQ 0.2.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....ipc.weight_format import WeightFormat
from ..integer_weight import IntegerWeight
from .packed_bits import make_weight, unpack_words
from .stored_tensors import StoredTensors

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word


def read_awq(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
    """4 bits with zeros."""
    num_out, num_in = shape
    groups = weight_format.count_groups(num_in)
    codes = _unpack(tensors.take("qweight", [torch.int32], (num_in, num_out // 8)))
    zeros = _unpack(tensors.take("qzeros", [torch.int32], (groups, num_out // 8)))
    scales = tensors.take_scales("scales", (groups, num_out)).T.contiguous()
    return make_weight(codes, scales, 4, weight_format.group_size, zeros.contiguous().float())


def _unpack(words: Tensor) -> Tensor:
    """Words [rows, out / 8] as [out, rows]."""
    nibbles = unpack_words(words, 4, 8 * words.shape[1]).view(len(words), -1, 8)
    return nibbles[:, :, _PLACES].flatten(1).T
