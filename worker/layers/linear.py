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

from ...ipc.config import Quantization
from ...kernels.choice import choose_linear, native_library
from ...kernels.linear import (
    FORMATS,
    choose_variant,
    launch_linear,
    pack_linear,
    quantize_and_pack_linear,
)
from ...kernels.linear_int8 import linear_int8_reference, quantize_int8
from ...kernels.program import Kind, LinearTable, Multiply, NotNativeError, Program, Slot


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

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        """The same as an operation. Raises NotNativeError where there is none."""
        ...


class _PythonLinear:
    """A form of weight that the native program has no operation for."""

    def emit(self, program: Program, x: Slot, y: Slot) -> None:  # noqa: ARG002
        raise NotNativeError(type(self).__name__)


class TorchLinear(_PythonLinear):
    """The plain form, on any device."""

    is_exact = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return _count_bytes(self.weight, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


class TorchInt8Linear(_PythonLinear):
    """int8 weights on any device, made wide for every call: half the memory, slower than the plain form."""

    is_exact = False

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._weight, self._scales, self._bias = weight, scales, bias

    @property
    def size_bytes(self) -> int:
        return _count_bytes(self._weight, self._scales, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear_int8_reference(x, self._weight, self._scales, self._bias)


class TritonLinear(_PythonLinear):
    """Batch-invariant on a GPU, and the one for int8 weights there (kernels/linear_triton.py)."""

    is_exact = True

    def __init__(self, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> None:
        from ...kernels.linear_triton import launch_linear

        self._launch = launch_linear
        self._weight, self._scales, self._bias = weight, scales, bias

    @property
    def size_bytes(self) -> int:
        return _count_bytes(self._weight, self._scales, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch(x, self._weight, self._bias, self._scales)


class NativeLinear:
    """Our own kernels on the CPU (kernels/linear.py)."""

    is_exact = True

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        quantization: Quantization | None = None,
    ) -> None:
        self._library = library
        self._variant = choose_variant(library)
        self._num_out, self._num_in = weight.shape
        self._scales: Tensor | None = None
        if quantization == "int8":
            self._dtype = torch.int8
            self._packed, self._scales = quantize_and_pack_linear(library, weight)
        else:
            self._dtype = weight.dtype
            self._packed = pack_linear(library, weight)
        self._bias = bias

    @property
    def size_bytes(self) -> int:
        return _count_bytes(self._packed, self._scales, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return launch_linear(
            self._library,
            self._variant,
            x,
            self._packed,
            self._num_out,
            self._bias,
            self._dtype,
            self._scales,
        )

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        program.add(Kind.LINEAR, Multiply(linear=self.to_table(), x=x, y=y))

    def to_table(self) -> LinearTable:
        """The layer as an operation takes it: addresses that hold while this object lives."""
        return LinearTable(
            packed=self._packed.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_in=self._num_in,
            num_out=self._num_out,
            variant=self._variant,
            format=FORMATS[self._dtype],
        )


def make_linear(
    weight: Tensor,
    bias: Tensor | None = None,
    quantization: Quantization | None = None,
    is_strict: bool = False,
) -> Linear:
    """The fastest form for this weight's device and type. The caller gives the weight away.

    `is_strict` asks for an exact form where there is one: on the CPU the fastest is, on a GPU it costs time.
    """
    chosen = choose_linear(weight.dtype, weight.device, quantization, is_strict)
    if chosen == "native":
        return NativeLinear(native_library(), weight, bias, quantization)
    if quantization == "int8":
        quantized, scales = quantize_int8(weight)
        form = TritonLinear if chosen == "triton" else TorchInt8Linear
        return form(quantized, scales, bias)
    return TritonLinear(weight, None, bias) if chosen == "triton" else TorchLinear(weight, bias)


def _count_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
