"""The gated activation between the two projections of a feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from ...kernels.gated_activation import gated_activation_reference


class GatedActivation:
    """act(gate) * up, from the fused projection."""

    def __init__(self, activation: str) -> None:
        self._activation = activation

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, F] from [T, 2 F]."""
        return gated_activation_reference(gate_up, self._activation)
