"""Linear layers: y = x W^T + b, W [out, in], in the form that the device multiplies fastest.

A layer keeps one form of its weight. Who calls it does not know which; variants are chosen once, at load.
Legend: m rows of a step.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.linear import launch_linear, pack_linear
from ...kernels.native import find_library

# Multiply-adds that our kernel does in about the time of one call of oneDNN.
_SMALL_WORK = 1 << 20


class Linear(Protocol):
    """A linear layer with its weight loaded."""

    @property
    def size_bytes(self) -> int:
        """Bytes that its weight and bias hold."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[m, out] for contiguous x [m, in], of x's type."""
        ...


class TorchLinear:
    """The plain form, on any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


class PackedLinear:
    """oneDNN's own blocked layout, made once: 1.2-1.7 times the plain form's speed in bfloat16 on a CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.size_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        # Packed for one row: that layout also serves large ones, the reverse halves the speed of small ones.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class NativeLinear:
    """Our own kernel on the CPU, whose float32 rows do not depend on their number (kernels/linear.py)."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._num_out = weight.shape[0]
        self._packed = pack_linear(library, weight)
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return launch_linear(self._library, x, self._packed, self._num_out, self._bias)


class SmallLinear:
    """A small bfloat16 weight in two forms: oneDNN takes 17 us a call, our kernel 4, whatever the size.

    So our kernel serves steps of few rows, oneDNN the others, which it computes up to 8 times faster.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._few = NativeLinear(library, weight, bias)
        self._many = PackedLinear(weight, bias)
        self._max_few = _SMALL_WORK // weight.numel()

    @property
    def size_bytes(self) -> int:
        return self._few.size_bytes + self._many.size_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x) if x.shape[0] <= self._max_few else self._many(x)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest form for this weight's device and type. The caller gives the weight away."""
    library = find_library(weight.dtype, weight.device)
    if library is not None and weight.dtype == torch.float32:
        return NativeLinear(library, weight, bias)
    if (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    ):
        if library is not None and weight.numel() <= _SMALL_WORK:
            return SmallLinear(library, weight, bias)
        return PackedLinear(weight, bias)
    return TorchLinear(weight, bias)
