"""Linear layers: y = x W^T + b, W [out, in], in the form that the device multiplies fastest.

A layer keeps one form of its weight. Who calls it does not know which; variants are chosen once, at load.
Legend: m rows of a step.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from ...kernels.decoder import LinearTable
from ...kernels.linear import FORMATS, choose_variant, launch_linear, pack_linear
from ...kernels.native import find_library


class Linear(Protocol):
    """A linear layer with its weight loaded."""

    @property
    def size_bytes(self) -> int:
        """Bytes that its weight and bias hold."""
        ...

    @property
    def is_exact(self) -> bool:
        """True if a row's bits do not depend on the rows beside it, their number, or threads."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[m, out] for contiguous x [m, in], of x's type."""
        ...


class TorchLinear:
    """The plain form, on any device."""

    is_exact = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


class NativeLinear:
    """Our own kernels on the CPU (kernels/linear.py)."""

    is_exact = True

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library
        self._variant = choose_variant(library)
        self._dtype = weight.dtype
        self._num_out, self._num_in = weight.shape
        self._packed = pack_linear(library, weight)
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return self._packed.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return launch_linear(
            self._library, self._variant, x, self._packed, self._num_out, self._bias, self._dtype
        )

    def to_table(self) -> LinearTable:
        """The layer as the native forward pass takes it: addresses that hold while this object lives."""
        return LinearTable(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_in=self._num_in,
            num_out=self._num_out,
            variant=self._variant,
            format=FORMATS[self._dtype],
        )


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest form for this weight's device and type. The caller gives the weight away."""
    library = find_library(weight.dtype, weight.device)
    if library is not None:
        return NativeLinear(library, weight, bias)
    return TorchLinear(weight, bias)
