"""Root mean square norm with its weight."""

from __future__ import annotations

from torch import Tensor

from ...kernels.rms_norm import add_rms_norm_reference, rms_norm_reference


class RMSNorm:
    """y = x / rms(x) * weight, over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm_reference(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual). Both arguments may be overwritten."""
        return add_rms_norm_reference(x, residual, self.weight, self.eps)
