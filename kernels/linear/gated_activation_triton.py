"""gated_activation on a GPU; formula and bytes in gated_activation.py."""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import ceil_div, next_power_of_2
from .gated_activation import ACTIVATIONS

_jit: typing.Any = triton.jit

_MAX_BLOCK = 2048
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TANH_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@_jit
def _activate(x: typing.Any, ACTIVATION: tl.constexpr) -> typing.Any:
    """act(x) in float32; 0.5 (1 + tanh(u)) is written as sigmoid(2 u), which does not cancel."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    if ACTIVATION == "clamped_swiglu":
        clamped = tl.minimum(x, 7.0)
        return clamped / (1.0 + tl.exp(-1.702 * clamped))
    if ACTIVATION == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x / (1.0 + tl.exp(-(x + 0.044715 * x * x * x) * _TANH_SCALE))


@_jit
def _gated_activation(
    gate_up: typing.Any,
    y: typing.Any,
    size: int,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row and BLOCK columns. The activation is rounded first, as in the reference."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    wait_for_inputs(USE_PDL)
    gate = tl.load(gate_up + 2 * row * size + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * size + columns, mask=is_there, other=0.0).to(tl.float32)
    activated = _activate(gate, ACTIVATION).to(y.dtype.element_ty).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        up = tl.clamp(up, -7.0, 7.0) + 1.0
    tl.store(y + row * size + columns, (activated * up).to(y.dtype.element_ty), mask=is_there)


def launch_gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """[T, F] from a contiguous [T, 2 F]; `activation` is one of ACTIVATIONS."""
    assert gate_up.is_contiguous()
    assert activation in ACTIVATIONS, activation
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty((rows, size))
    if rows:
        block = min(_MAX_BLOCK, next_power_of_2(size))
        _gated_activation[(rows, ceil_div(size, block))](
            gate_up, y, size, ACTIVATION=activation, BLOCK=block, **launch_options(gate_up.device)
        )
    return y
