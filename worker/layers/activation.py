"""The gated activation between the two projections of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel, native_library
from ...kernels.linear.gated_activation import (
    ACTIVATIONS,
    gated_activation_reference,
    launch_gated_activation,
)
from ...kernels.program.program import Activate, Kind, Program, Slot


class GatedActivation:
    """act(gate) * up, from the fused projection."""

    def __init__(self, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = activation
        self._compute = _choose_kernel(dtype, device)

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, F] from [T, 2 F]."""
        return self._compute(gate_up, self._activation)

    def emit(self, program: Program, x: Slot, y: Slot, size: int) -> None:
        """The same as an operation: y [T, size] of x [T, 2 size]."""
        program.add(Kind.ACTIVATE, Activate(x=x, y=y, size=size, activation=ACTIVATIONS[self._activation]))


def _choose_kernel(dtype: torch.dtype, device: torch.device) -> Callable[[Tensor, str], Tensor]:
    chosen = choose_kernel("gated_activation", dtype, device)
    if chosen == "triton":
        from ...kernels.linear import gated_activation_triton

        return gated_activation_triton.launch_gated_activation
    return (
        partial(launch_gated_activation, native_library())
        if chosen == "native"
        else gated_activation_reference
    )
