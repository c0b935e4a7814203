"""Linear layers: y = act(x W^T + b), W [out, in], in the form that the device multiplies fastest.

A layer keeps one form of its weight. Who calls it does not know which; variants are chosen once, at load.
Legend: m rows of a step.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ipc.config import Quantization
from ...kernels.choice import choose_linear, native_library
from ...kernels.gated_activation import FUNCTIONS, number_activation
from ...kernels.linear import FORMATS, choose_variant, launch_linear, pack_linear, quantize_and_pack_linear
from ...kernels.linear_int8 import linear_int8_reference, quantize_int8
from ...kernels.program import Kind, LinearTable, Multiply, NotNativeError, Program, Slot


class Linear(ABC):
    """A linear layer with its weight loaded, which has scales if it is int8."""

    # Whether a row's bits do not depend on the rows beside it, their number, or threads.
    is_exact = False

    # What follows the sum; a native layer computes it before it rounds the sum.
    activation: str | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        self.weight, self._bias, self._scales = weight, bias, scales

    @property
    def size_bytes(self) -> int:
        """Bytes that its weight and bias hold."""
        return sum(part.nbytes for part in (self.weight, self._bias, self._scales) if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[m, out] for contiguous x [m, in], of x's type."""
        y = self.multiply(x)
        return y if self.activation is None else FUNCTIONS[self.activation](y)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """The same without the activation."""

    def emit(self, program: Program, x: Slot, y: Slot) -> None:  # noqa: ARG002
        """The same as an operation. Raises NotNativeError where there is none."""
        raise NotNativeError(type(self).__name__)


class TorchLinear(Linear):
    """The plain form, on any device."""

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


class TorchInt8Linear(Linear):
    """int8 weights on any device, made wide for every call: half the memory, slower than the plain form."""

    def multiply(self, x: Tensor) -> Tensor:
        assert self._scales is not None
        return linear_int8_reference(x, self.weight, self._scales, self._bias)


class TritonLinear(Linear):
    """Batch-invariant on a GPU, and the one for int8 weights there (kernels/linear_triton.py)."""

    is_exact = True

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        from ...kernels.linear_triton import launch_linear

        super().__init__(weight, bias, scales)
        self._launch = launch_linear

    def multiply(self, x: Tensor) -> Tensor:
        return self._launch(x, self.weight, self._bias, self._scales)


class NativeLinear(Linear):
    """Our own kernels on the CPU (kernels/linear.py)."""

    is_exact = True

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        quantization: Quantization | None = None,
    ) -> None:
        is_int8 = quantization == "int8"
        packed, scales = (
            quantize_and_pack_linear(library, weight) if is_int8 else (pack_linear(library, weight), None)
        )
        super().__init__(packed, bias, scales)
        self._library = library
        self._variant = choose_variant(library)
        self._num_out, self._num_in = weight.shape
        self._dtype = torch.int8 if is_int8 else weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch(x, self.activation)

    def multiply(self, x: Tensor) -> Tensor:
        return self._launch(x, None)

    def _launch(self, x: Tensor, activation: str | None) -> Tensor:
        return launch_linear(
            self._library,
            self._variant,
            x,
            self.weight,
            self._num_out,
            self._bias,
            self._dtype,
            self._scales,
            activation,
        )

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        program.add(Kind.LINEAR, Multiply(linear=self.to_table(), x=x, y=y))

    def to_table(self) -> LinearTable:
        """The layer as an operation takes it: addresses that hold while this object lives."""
        return LinearTable(
            packed=self.weight.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_in=self._num_in,
            num_out=self._num_out,
            variant=self._variant,
            format=FORMATS[self._dtype],
            activation=number_activation(self.activation),
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
        return form(quantized, bias, scales)
    return (TritonLinear if chosen == "triton" else TorchLinear)(weight, bias)
