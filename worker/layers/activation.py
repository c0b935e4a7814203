"""The gated activation between the two projections of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...kernels.gated_activation import gated_activation_reference, launch_gated_activation
from ...kernels.native import find_library
from ...kernels.triton_runtime import can_use_triton


class GatedActivation:
    """act(gate) * up, from the fused projection."""

    def __init__(self, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = activation
        self._compute = _choose_kernel(dtype, device)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, F] from [T, 2 F]."""
        return self._compute(gate_up, self._activation)


def _choose_kernel(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor, str], Tensor]:
    if can_use_triton(device):
        from ...kernels import gated_activation_triton

        return gated_activation_triton.launch_gated_activation
    library = find_library(dtype, device)
    return gated_activation_reference if library is None else partial(launch_gated_activation, library)
