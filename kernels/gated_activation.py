"""Gated activation of a feed-forward layer: y = act(x[:, :F]) * x[:, F:], act one of silu, gelu, gelu_tanh.

Bytes: reads 2 F and writes F values a row. Legend: T tokens, F width of the layer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    """[T, F] from the fused projection [T, 2 F]; the gate's half comes first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up
