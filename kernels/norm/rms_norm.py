"""Root mean square norm: y = x / sqrt(mean(x^2) + eps) * (offset + weight), alone or after adding a residual.

The mean is taken in float32. With `rounds_normed` the normed row is rounded to x's type before it is
multiplied, as most models were trained; without, only the product is.
Bytes: reads x (and the residual) once, writes y (and the sum) once.
Legend: T rows, D row length.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, rounds_normed: bool = True
) -> Tensor:
    """y [..., D] of x's type. Each row depends on itself alone."""
    normed = x.float()
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if rounds_normed:
        normed = normed.to(x.dtype)
    return (normed * (weight_offset + weight.float())).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounds_normed: bool = True,
) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), both [T, D] of x's type."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, weight_offset, rounds_normed), total


def launch_rms_norm(
    library: ctypes.CDLL,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounds_normed: bool = True,
    in_place: bool = False,
) -> Tensor:
    """Norm of x, or of x + residual where `residual` is given and overwritten by that sum.

    All contiguous [T, D] (the weight [D]) on the CPU, float32 or bfloat16 alike. With `in_place`, which is
    without a residual, the result is x, which may be some columns of a larger tensor.
    """
    y = x if in_place else torch.empty_like(x)
    sizes = (*x.shape, x.stride(0) if in_place else x.shape[1])
    is_bf16 = x.dtype is torch.bfloat16
    library.quire_rms_norm(is_bf16, x, residual, weight, y, *sizes, eps, weight_offset, rounds_normed)
    return y
