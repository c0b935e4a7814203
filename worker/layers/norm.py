"""Root mean square norm with its weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ...kernels.choice import choose_norm, native_library
from ...kernels.program import Kind, Norm, Program, Slot
from ...kernels.rms_norm import add_rms_norm_reference, launch_rms_norm, rms_norm_reference

# (x, residual to add and overwrite, weight, eps, weight offset) -> norm
_Kernel = Callable[[Tensor, Tensor | None, Tensor, float, float], Tensor]


class RMSNorm:
    """y = x / rms(x) * weight, over the last dimension; with an offset it is added to the weight."""

    def __init__(self, weight: Tensor, eps: float, weight_offset: float = 0.0) -> None:
        self.weight = weight
        self.size = weight.shape[0]
        self._numbers = eps, weight_offset
        self._kernel = _choose_kernel(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(x, None, self.weight, *self._numbers)
        return rms_norm_reference(x, self.weight, *self._numbers)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments may be overwritten."""
        if self._kernel is not None:
            return self._kernel(x, residual, self.weight, *self._numbers), residual
        return add_rms_norm_reference(x, residual, self.weight, *self._numbers)

    def emit(self, program: Program, x: Slot, y: Slot, residual: Slot | None = None) -> None:
        """The same as an operation: y = norm(x); with a residual residual += x, y = norm(residual)."""
        eps, weight_offset = self._numbers
        operation = Norm(weight=self.weight.data_ptr(), x=x, y=y, size=self.size, eps=eps)
        operation.weight_offset = weight_offset
        if residual is not None:
            operation.residual = residual
        program.add(Kind.NORM if residual is None else Kind.ADD_NORM, operation)


def _choose_kernel(weight: Tensor) -> _Kernel | None:
    """None where torch's operations are what there is."""
    chosen = choose_norm(weight.shape[0], weight.dtype, weight.device)
    if chosen == "triton":
        from ...kernels import rms_norm_triton

        return rms_norm_triton.launch_rms_norm
    return partial(launch_rms_norm, native_library()) if chosen == "native" else None
