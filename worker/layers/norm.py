"""Root mean square norm with its weight."""

from __future__ import annotations

from torch import Tensor

from ...kernels.native import find_library
from ...kernels.rms_norm import add_rms_norm_reference, launch_rms_norm, rms_norm_reference


class RMSNorm:
    """y = x / rms(x) * weight, over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._library = find_library(weight.dtype, weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._library is not None:
            return launch_rms_norm(self._library, x, None, self.weight, self.eps)
        return rms_norm_reference(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments may be overwritten."""
        if self._library is not None:
            return launch_rms_norm(self._library, x, residual, self.weight, self.eps), residual
        return add_rms_norm_reference(x, residual, self.weight, self.eps)
