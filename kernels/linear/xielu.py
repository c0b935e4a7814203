"""xIELU (arXiv 2411.13010): alpha_p x^2 + beta x above 0, alpha_n (exp(min(x, eps)) - 1 - x) + beta x below.

Bytes: reads and writes each number once.
"""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class XieluNumbers:
    """A layer's constants, as the formula has them."""

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


class XieluTable(ctypes.Structure):
    """QuireXielu."""

    _fields_ = [(name, ctypes.c_float) for name in ("alpha_p", "alpha_n", "beta", "eps")]


def xielu_reference(x: Tensor, numbers: XieluNumbers) -> Tensor:
    """Of any shape and type; computed in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    above = numbers.alpha_p * wide * wide
    below = numbers.alpha_n * (torch.expm1(wide.clamp(max=numbers.eps)) - wide)
    return (torch.where(wide > 0, above, below) + numbers.beta * wide).to(x.dtype)


def launch_xielu(library: ctypes.CDLL, x: Tensor, numbers: XieluNumbers) -> Tensor:
    """The same in place, of a contiguous x on the CPU, float32 or bfloat16."""
    table = XieluTable(*astuple(numbers))
    library.quire_xielu(x.dtype is torch.bfloat16, x, x.numel(), ctypes.byref(table))
    return x
