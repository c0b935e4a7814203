"""Layer norm with its weight and bias, with the calls of an RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ...kernels import program as ops
from ...kernels.choice import choose_norm, native_library
from ...kernels.layer_norm import launch_layer_norm, layer_norm_reference
from ...kernels.program import Kind, Program, Slot

# (x, residual to add and overwrite, weight, bias, eps) -> norm
_Kernel = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float], Tensor]


class LayerNorm:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.size = weight.shape[0]
        self._bias, self._eps = bias, eps
        self._kernel = _choose_kernel(weight)

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


def _choose_kernel(weight: Tensor) -> _Kernel:
    chosen = choose_norm(weight.shape[0], weight.dtype, weight.device, "layer_norm")
    if chosen == "triton":
        from ...kernels import layer_norm_triton

        return layer_norm_triton.launch_layer_norm
    return partial(launch_layer_norm, native_library()) if chosen == "native" else _compute_reference


def _compute_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    return layer_norm_reference(x if residual is None else residual.add_(x), weight, bias, eps)
