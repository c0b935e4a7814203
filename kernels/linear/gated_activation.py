"""Gated activation of a feed-forward layer: y = act(x[:, :F]) * x[:, F:], act one of ACTIVATIONS.

The clamped SwiGLU of gpt-oss is min(g, 7) sigmoid(1.702 min(g, 7)) (clamp(u, -7, 7) + 1) of gate g and up u.

Bytes: reads 2 F and writes F values a row. Legend: T tokens, F width of the layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# Names of the activations, as activation.h numbers them.
ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "clamped_swiglu": 5, "relu2": 6}
_NO_ACTIVATION = 0
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "clamped_swiglu": lambda x: x.clamp(max=7.0) * (x.clamp(max=7.0) * 1.702).sigmoid(),
    "relu2": lambda x: F.relu(x).square(),
}


def number_activation(activation: str | None) -> int:
    """The activation's QuireActivation."""
    return _NO_ACTIVATION if activation is None else ACTIVATIONS[activation]


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    """[T, F] from the fused projection [T, 2 F]; the gate's half comes first."""
    gate, up = gate_up.chunk(2, dim=-1)
    up = up.clamp(-7.0, 7.0) + 1 if activation == "clamped_swiglu" else up
    return FUNCTIONS[activation](gate) * up


def launch_gated_activation(library: ctypes.CDLL, gate_up: Tensor, activation: str) -> Tensor:
    """The same for a contiguous `gate_up` on the CPU, float32 or bfloat16; y is rounded twice."""
    rows, width = gate_up.shape
    y = gate_up.new_empty((rows, width // 2))
    is_bf16 = gate_up.dtype is torch.bfloat16
    library.quire_gated_activation(is_bf16, ACTIVATIONS[activation], gate_up, y, rows, width // 2)
    return y
