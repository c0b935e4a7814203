"""Root mean square norm and layer norm, and what stands in their place where a layer has none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ...kernels.choice import choose_norm, native_library
from ...kernels.norm.layer_norm import launch_layer_norm, layer_norm_reference
from ...kernels.norm.rms_norm import add_rms_norm_reference, launch_rms_norm, rms_norm_reference
from ...kernels.program import program as ops
from ...kernels.program.program import Add, Kind, Norm, Program, Scale, Slot

# (x, residual to add and overwrite, weight, eps, weight offset, rounds_normed, in_place) -> norm
_Kernel = Callable[[Tensor, Tensor | None, Tensor, float, float, bool, bool], Tensor]


class RMSNorm:
    """y = x / rms(x) * (offset + weight), over the last dimension (kernels/norm/rms_norm.py)."""

    def __init__(
        self, weight: Tensor, eps: float, weight_offset: float = 0.0, rounds_normed: bool = True
    ) -> None:
        self.weight = weight
        self.size = weight.shape[0]
        self.numbers = eps, weight_offset, rounds_normed
        self._kernel = _choose_kernel(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(x, None, self.weight, *self.numbers, False)
        return rms_norm_reference(x, self.weight, *self.numbers)

    def normalize_(self, x: Tensor) -> None:
        """Overwrite x [T, D], which may be some columns of a larger tensor, with its norm."""
        if self._kernel is not None:
            self._kernel(x, None, self.weight, *self.numbers, True)
        else:
            x.copy_(rms_norm_reference(x, self.weight, *self.numbers))

    def normalize_each_(self, x: Tensor) -> None:
        """`normalize_` of each D columns of x [T, count * D] by themselves."""
        for part in x.split(self.size, 1):
            self.normalize_(part)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments may be overwritten."""
        if self._kernel is not None:
            return self._kernel(x, residual, self.weight, *self.numbers, False), residual
        return add_rms_norm_reference(x, residual, self.weight, *self.numbers)

    def emit(self, program: Program, x: Slot, y: Slot, residual: Slot | None = None) -> Slot:
        """The same as an operation: y = norm(x); with a residual residual += x, y = norm(residual).

        The slot of the norm comes back.
        """
        operation = self._operation(x=x, y=y, stride=self.size)
        if residual is not None:
            operation.residual = residual
        program.add(Kind.NORM if residual is None else Kind.ADD_NORM, operation)
        return y

    def emit_in_place(self, program: Program, x: Slot, first: int, stride: int, count: int = 1) -> None:
        """`normalize_each_` as an operation, of the numbers from `first` on in rows of `stride` numbers."""
        program.add(Kind.NORM, self._operation(x=x, y=x, first=first, stride=stride, count=count))

    def _operation(self, count: int = 1, **fields: int) -> ctypes.Structure:
        eps, weight_offset, rounds_normed = self.numbers
        operation = Norm(weight=self.weight.data_ptr(), size=self.size, count=count, **fields)
        operation.rounds_normed = rounds_normed
        operation.eps, operation.weight_offset = eps, weight_offset
        return operation


class NoNorm:
    """Stands where a layer has no norm: what comes, or its sum with what was before, goes on as it is."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, twice, in the residual's memory."""
        residual += x
        return residual, residual

    def emit(self, program: Program, x: Slot, y: Slot, residual: Slot | None = None) -> Slot:  # noqa: ARG002
        """The same as an operation, if there is something to add. The slot of the sum comes back, never y."""
        if residual is None:
            return x
        program.add(Kind.ADD, Add(x=x, residual=residual, size=self.size))
        return residual


class Scaled:
    """Stands where what a part adds is multiplied by a number, behind a norm if there is one."""

    def __init__(self, size: int, factor: float, norm: RMSNorm | LayerNorm | None = None) -> None:
        self.size = size
        self._factor, self._norm = factor, norm

    def __call__(self, x: Tensor) -> Tensor:
        return (x if self._norm is None else self._norm(x)) * self._factor

    def emit(self, program: Program, x: Slot, y: Slot) -> Slot:
        """The same as an operation; y is x's slot."""
        assert x == y
        if self._norm is not None:
            self._norm.emit(program, x, y)
        program.add(Kind.SCALE, Scale(x=x, size=self.size, factor=self._factor))
        return y


def _choose_kernel(weight: Tensor) -> _Kernel | None:
    """The kernel for a norm; None if only torch's operations can compute it."""
    chosen = choose_norm(weight.shape[0], weight.dtype, weight.device)
    if chosen == "triton":
        from ...kernels.norm import rms_norm_triton

        return rms_norm_triton.launch_rms_norm
    return partial(launch_rms_norm, native_library()) if chosen == "native" else None


# (x, residual to add and overwrite, weight, bias, eps) -> norm
_LayerNormKernel = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float], Tensor]


class LayerNorm:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.size = weight.shape[0]
        self._bias, self._eps = bias, eps
        self._kernel = _choose_layer_norm(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernel(x, None, self.weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments may be overwritten."""
        return self._kernel(x, residual, self.weight, self._bias, self._eps), residual

    def emit(self, program: Program, x: Slot, y: Slot, residual: Slot | None = None) -> Slot:
        """As `RMSNorm.emit`; y may be the residual's slot."""
        operation = ops.LayerNorm(weight=self.weight.data_ptr(), x=x, y=y, size=self.size)
        operation.eps = self._eps
        operation.bias = None if self._bias is None else self._bias.data_ptr()
        if residual is not None:
            operation.residual, operation.adds = residual, 1
        program.add(Kind.LAYER_NORM, operation)
        return y


def _choose_layer_norm(weight: Tensor) -> _LayerNormKernel:
    chosen = choose_norm(weight.shape[0], weight.dtype, weight.device, "layer_norm")
    if chosen == "triton":
        from ...kernels.norm import layer_norm_triton

        return layer_norm_triton.launch_layer_norm
    return partial(launch_layer_norm, native_library()) if chosen == "native" else _compute_reference


def _compute_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    if residual is not None:
        x = x.float() + residual.float()
        residual.copy_(x)
    return layer_norm_reference(x, weight, bias, eps)
