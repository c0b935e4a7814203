"""mxfp4 (OCP Microscaling): e2m1 numbers, the first of a pair in the low half, 2^(e - 127) for each 32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..integer_weight import IntegerWeight

GROUP_SIZE = 32
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make_mxfp4_weight(packed: Tensor, scales: Tensor) -> IntegerWeight:
    """Of bytes [out, in / 2] and powers of two [out, in / 32], which bfloat16 holds."""
    codebook = torch.tensor([*_NUMBERS, *(-number for number in _NUMBERS)])
    num_in = 2 * packed.shape[1]
    return IntegerWeight(packed.contiguous(), scales.bfloat16(), 4, num_in, GROUP_SIZE, codebook=codebook)
