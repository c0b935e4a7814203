"""Linear layer on the CPU: y = x W^T + b, x [m, K], W [N, K], in a layout packed once.

Every output is one float32 chain of multiply-adds over K, in order: a row's bits do not depend on the
number of rows, which neither MKL nor oneDNN promises. Bytes: W once for each 96 rows; operations 2 m K N.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [m, N]."""
    return F.linear(x, weight, bias)


def pack_linear(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    """The weight [N, K] as [panels, K, panel width], zeros past N: a copy of the same size, rounded up."""
    panel = library.quire_linear_panel()
    num_out, num_in = weight.shape
    panels = -(-num_out // panel)
    packed = weight.new_zeros((panels, num_in, panel))
    for index in range(panels):
        part = weight[index * panel : (index + 1) * panel]
        packed[index, :, : part.shape[0]] = part.t()
    return packed


def launch_linear(
    library: ctypes.CDLL, x: Tensor, packed: Tensor, num_out: int, bias: Tensor | None
) -> Tensor:
    """y [m, N] for contiguous x [m, K] and a packed weight of its type, float32 or bfloat16, on the CPU."""
    rows, num_in = x.shape
    y = x.new_empty((rows, num_out))
    library.quire_linear(
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        rows,
        num_in,
        packed.data_ptr(),
        num_out,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    return y
