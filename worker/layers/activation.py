"""The gated activation between the two projections of a feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.gated_activation import gated_activation_reference, launch_gated_activation
from ...kernels.native import find_library


class GatedActivation:
    """act(gate) * up, from the fused projection."""

    def __init__(self, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = activation
        self._library = find_library(dtype, device)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, F] from [T, 2 F]."""
        if self._library is not None:
            return launch_gated_activation(self._library, gate_up, self._activation)
        return gated_activation_reference(gate_up, self._activation)
