"""Root mean square norm: y = x / sqrt(mean(x^2) + eps) * weight, alone or after adding a residual.

The mean is taken in float32 and the normed row is rounded to x's type before the weight multiplies it, as
most models were trained. With a weight offset, offset + weight multiplies it and the product is rounded.
Bytes: reads x (and the residual) once, writes y (and the sum) once.
Legend: T rows, D row length.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """y [..., D] of x's type. Each row depends on itself alone."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset:
        return (wide * (weight_offset + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), both [T, D] of x's type."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, weight_offset), total


def launch_rms_norm(
    library: ctypes.CDLL,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> Tensor:
    """Norm of x, or of x + residual where `residual` is given and overwritten by that sum.

    All contiguous [T, D] (the weight [D]) on the CPU, float32 or bfloat16 alike.
    """
    y = torch.empty_like(x)
    rows, size = x.shape
    library.quire_rms_norm(
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        rows,
        size,
        eps,
        weight_offset,
    )
    return y
