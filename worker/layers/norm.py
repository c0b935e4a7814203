"""Root mean square norm with its weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ...kernels.native import find_library
from ...kernels.rms_norm import add_rms_norm_reference, launch_rms_norm, rms_norm_reference
from ...kernels.triton_runtime import can_use_triton

# (x, residual to add and overwrite, weight, eps) -> norm
_Kernel = Callable[[Tensor, Tensor | None, Tensor, float], Tensor]


class RMSNorm:
    """y = x / rms(x) * weight, over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._kernel = _choose_kernel(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if self._kernel is not None:
            return self._kernel(x, None, self.weight, self.eps)
        return rms_norm_reference(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments may be overwritten."""
        if self._kernel is not None:
            return self._kernel(x, residual, self.weight, self.eps), residual
        return add_rms_norm_reference(x, residual, self.weight, self.eps)


def _choose_kernel(weight: Tensor) -> _Kernel | None:
    """None where torch's operations are what there is."""
    if can_use_triton(weight.device):
        from ...kernels import rms_norm_triton

        if weight.shape[0] <= rms_norm_triton.MAX_ROW_SIZE:
            return rms_norm_triton.launch_rms_norm
    library = find_library(weight.dtype, weight.device)
    return None if library is None else partial(launch_rms_norm, library)
