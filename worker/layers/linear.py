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
    """float32 on the CPU by our own kernel, whose rows do not depend on their number (kernels/linear.py)."""

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


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest form for this weight's device and type. The caller gives the weight away."""
    if (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
    ):
        return PackedLinear(weight, bias)
    library = find_library(weight.dtype, weight.device)
    if library is not None and weight.dtype == torch.float32:
        return NativeLinear(library, weight, bias)
    return TorchLinear(weight, bias)
