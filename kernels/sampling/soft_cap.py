"""Soft cap of logits: cap * tanh(x / cap) bounds them smoothly (Gemma 2, arXiv 2408.00118, section 2)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    """The same shape and type, on any device."""
    return cap * torch.tanh(x / cap)


def launch_soft_cap(library: ctypes.CDLL, x: Tensor, cap: float) -> Tensor:
    """The same in place for a contiguous float32 `x` on the CPU."""
    library.quire_soft_cap(x, x.numel(), cap)
    return x
