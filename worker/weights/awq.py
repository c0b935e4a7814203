"""AWQ, version gemm: a row an input, in whose words the outputs stand in an order of their own.

Source: WQLinear_GEMM of AutoAWQ 0.2.7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ipc.spec.weight_format import WeightFormat
from .integer_weight import IntegerWeight, unpack_nibbles
from .packed_bits import make_packed
from .stored_tensors import StoredTensors

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word


def read_awq(tensors: StoredTensors, weight_format: WeightFormat, shape: tuple[int, int]) -> IntegerWeight:
    """4 bits with zeros."""
    num_out, num_in = shape
    groups = weight_format.count_groups(num_in)
    words = tensors.take("qweight", [torch.int32], (num_in, num_out // 8))
    zeros = tensors.take("qzeros", [torch.int32], (groups, num_out // 8))
    scales = tensors.take_scales("scales", (groups, num_out)).T.contiguous()
    size, shifts = weight_format.group_size, unpack_nibbles(_turn(zeros), groups).float()
    return make_packed(_turn(words), scales, 4, num_in, size, shifts)


def _turn(words: Tensor) -> Tensor:
    """Words [rows, out / 8] as nibbles [out, rows / 2] in order; made of pairs of rows, a byte of each."""
    if len(words) % 2:
        words = torch.nn.functional.pad(words, (0, 0, 0, 1))
    pairs = words.contiguous().view(torch.uint8).T.contiguous().view(torch.int16)  # [out / 2, rows / 2]
    halves = torch.stack((pairs & 0x0F | pairs >> 4 & 0xF0, pairs >> 4 & 0x0F | pairs >> 8 & 0xF0), 1)
    return halves.to(torch.uint8).view(-1, 8, pairs.shape[1])[:, _PLACES].flatten(0, 1)
