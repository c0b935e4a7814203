"""Linear layers: y = act(x W^T + b), W [out, in], in the form that the device multiplies fastest.

A layer keeps one form of its weight. Who calls it does not know which; variants are chosen once, at load.
Legend: m rows of a step.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.choice import choose_linear, native_library
from ...kernels.linear.gated_activation import FUNCTIONS
from ...kernels.linear.linear import (
    PackedWeight,
    Variant,
    choose_variant,
    launch_linear,
    make_table,
    pack_linear,
    pack_narrow_linear,
)
from ...kernels.program.program import Kind, LinearTable, Multiply, NotNativeError, Program, Slot
from ..weights.integer_weight import (
    IntegerWeight,
    NarrowWeight,
    count_tensor_bytes,
    dequantize,
    spread_scales,
)
from ..weights.layer_weights import cut_weight
from ..weights.weights import TensorSlice

_WIDE_SIZE = 1 << 22  # numbers of a narrow weight that are made wide at a time, in float64


class Linear(ABC):
    """A linear layer with its weight loaded."""

    # Whether a row's bits do not depend on the rows beside it, their number, or threads.
    is_exact = False

    # What follows the sum; a native layer computes it before it rounds the sum.
    activation: str | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self._bias = weight, bias

    @property
    def plain_weight(self) -> Tensor | None:
        """The weight [out, in] where it is kept as it is multiplied, in x's type; else None."""
        return None

    @property
    def bias(self) -> Tensor | None:
        """What is added, [out], or None."""
        return self._bias

    @property
    def size_bytes(self) -> int:
        """Bytes that its weight and bias hold."""
        return self.weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

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

    @property
    def plain_weight(self) -> Tensor:
        return self.weight

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self._bias)


class TorchNarrowLinear(Linear):
    """Narrow weights on any device, some rows of them made wide at a time: slower than the plain form."""

    def __init__(self, weight: NarrowWeight, bias: Tensor | None) -> None:
        super().__init__(weight.scales, bias)
        self._size_bytes = count_tensor_bytes(weight)
        step = max(1, _WIDE_SIZE // weight.num_in)
        starts = range(0, weight.num_out, step)
        self._parts = [
            cut_weight("", weight, TensorSlice((range(start, min(start + step, weight.num_out)),)))
            for start in starts
        ]

    @property
    def size_bytes(self) -> int:
        return self._size_bytes + (0 if self._bias is None else self._bias.nbytes)

    def multiply(self, x: Tensor) -> Tensor:
        y = torch.cat([F.linear(x, dequantize(part).to(x.dtype)) for part in self._parts], dim=1)
        return y if self._bias is None else y + self._bias


class TritonLinear(Linear):
    """Batch-invariant on a GPU; there also int8 weights with a scale an output (linear_triton.py)."""

    is_exact = True

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        from ...kernels.linear.linear_triton import launch_linear

        super().__init__(weight, bias)
        self._launch, self._scales = launch_linear, scales

    @property
    def plain_weight(self) -> Tensor | None:
        return self.weight if self._scales is None else None

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + (0 if self._scales is None else self._scales.nbytes)

    def multiply(self, x: Tensor) -> Tensor:
        return self._launch(x, self.weight, self._bias, self._scales)


class TritonNarrowLinear(Linear):
    """Narrow weights on a GPU, in registers (kernels/linear/narrow_linear_triton.py); batch-invariant too."""

    is_exact = True

    def __init__(self, weight: NarrowWeight, bias: Tensor | None) -> None:
        from ...kernels.linear.narrow_linear_triton import launch_narrow_linear, pack_narrow_weight

        self._launch, self._packed = launch_narrow_linear, pack_narrow_weight(**_list_parts(weight))
        super().__init__(self._packed.codes, bias)

    @property
    def size_bytes(self) -> int:
        return self._packed.size_bytes + (0 if self._bias is None else self._bias.nbytes)

    def multiply(self, x: Tensor) -> Tensor:
        return self._launch(x, self._packed, self._bias)


class NativeLinear(Linear):
    """Our own kernels on the CPU (kernels/linear/linear.py)."""

    is_exact = True

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor | NarrowWeight | PackedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._library = library
        self._variant = choose_variant(library) if dtype is torch.bfloat16 else Variant.VECTOR
        self.packed = _pack(library, self._variant, weight)
        super().__init__(self.packed.packed, bias)

    @property
    def size_bytes(self) -> int:
        return self.packed.size_bytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return launch_linear(self._library, self.to_table(), x)

    def multiply(self, x: Tensor) -> Tensor:
        return launch_linear(self._library, make_table(self.packed, self._variant, self._bias), x)

    def emit(self, program: Program, x: Slot, y: Slot) -> None:
        program.add(Kind.LINEAR, Multiply(linear=self.to_table(), x=x, y=y))

    def to_table(self) -> LinearTable:
        """The layer as an operation takes it: addresses that hold while this object lives."""
        return make_table(self.packed, self._variant, self._bias, self.activation)


def _pack(
    library: ctypes.CDLL, variant: Variant, weight: Tensor | NarrowWeight | PackedWeight
) -> PackedWeight:
    if isinstance(weight, PackedWeight):
        return weight
    if isinstance(weight, Tensor):
        return pack_linear(library, weight)
    return _pack_narrow(library, variant, weight)


def _pack_narrow(library: ctypes.CDLL, variant: Variant, weight: NarrowWeight) -> PackedWeight:
    return pack_narrow_linear(library, variant, **_list_parts(weight))


def _list_parts(weight: NarrowWeight) -> dict[str, Any]:
    """The arguments of `pack_narrow_linear`, and of its like for GPUs."""
    if isinstance(weight, IntegerWeight):
        return {field.name: getattr(weight, field.name) for field in fields(weight)}
    scales = spread_scales(weight.scales, weight.num_out, weight.scales.shape[1], weight.group_rows, 1)
    return {
        "codes": weight.values,
        "scales": scales,
        "bits": 8,
        "num_in": weight.num_in,
        "group_size": weight.group_size,
    }


def make_linear(
    weight: Tensor | NarrowWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    is_strict: bool = False,
) -> Linear:
    """The fastest form for this weight's device and x's type, by default the weight's. It is given away.

    `is_strict` asks for an exact form where there is one: on the CPU the fastest is, on a GPU it costs time.
    """
    if isinstance(weight, Tensor):
        chosen = choose_linear(weight.dtype, weight.device, None, is_strict)
        if chosen == "native":
            return NativeLinear(native_library(), weight, bias, weight.dtype)
        return (TritonLinear if chosen == "triton" else TorchLinear)(weight, bias)
    assert dtype is not None
    format = "int8" if _has_a_scale_an_output(weight) else "narrow"
    chosen = choose_linear(dtype, weight.scales.device, format, is_strict)
    if chosen == "native":
        return NativeLinear(native_library(), weight, bias, dtype)
    if chosen == "triton" and format == "int8" and isinstance(weight, IntegerWeight):
        return TritonLinear((weight.codes ^ 128).view(torch.int8), bias, weight.scales.squeeze(1).float())
    return (TritonNarrowLinear if chosen == "triton" else TorchNarrowLinear)(weight, bias)


def _has_a_scale_an_output(weight: NarrowWeight) -> bool:
    """Whether it is symmetric int8 with no more than that."""
    if not isinstance(weight, IntegerWeight) or weight.bits != 8 or weight.scales.shape[1] > 1:
        return False
    return weight.offsets is None and weight.permutation is None
