"""Layer norm (arXiv 1607.06450): y = (x - mean) / sqrt(variance + eps) * weight + bias, alone or of a sum.

Sum, mean and variance are taken in float32, and y is rounded once: where the sum is rounded first, errors of
bfloat16 encoders are 1.4 times as large. Bytes: reads x (and the residual) once, writes y (and the sum) once.
Legend: T rows, D row length.
"""

from __future__ import annotations

import ctypes

from torch import Tensor
from torch.nn import functional as F


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y [T, D] of the weight's type. Each row depends on itself alone."""
    float_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), float_bias, eps).to(weight.dtype)


def launch_layer_norm(
    library: ctypes.CDLL, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Norm of x, or of x + residual where `residual` is given and overwritten by that sum.

    All contiguous [T, D] (weight and bias [D]) on the CPU, float32 or bfloat16 alike.
    """
    y = x.new_empty(x.shape)
    library.quire_layer_norm(x.dtype.itemsize == 2, x, residual, weight, bias, y, *x.shape, eps)
    return y
