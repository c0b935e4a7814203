"""A causal convolution of each channel by itself, whose state is what the last tokens gave to it.

    u[t] = before * x[t];  y[t] = after * act(bias + sum over k of weight[k] * u[t - kernel_size + 1 + k])

in float32, with gates `before` and `after` or without; the state is the last kernel_size - 1 rows of u, and u
is 0 before a request's first token. Bytes: each row once in, a third or all of it out.
Legend: T tokens, C channels.
"""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linear.gated_activation import number_activation
from .states import RequestStates, StatesTable


class CausalConv(NamedTuple):
    """A layer's numbers and sizes. Its state is (kernel_size - 1) * C numbers of a slot, from `offset` on."""

    weight: Tensor  # float32 [kernel_size, C], the newest token's row last
    bias: Tensor | None  # float32 [C]
    offset: int = 0
    first: int = 0  # of a row's numbers, the first channel
    is_gated: bool = False  # then a row is C numbers of `before`, C of `after`, C channels
    activation: Literal["silu"] | None = None

    @property
    def state_size(self) -> int:
        """Numbers of a request's state."""
        return self.weight[1:].numel()


class CausalConvTable(ctypes.Structure):
    """QuireCausalConv."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in ("num_channels", "kernel_size", "first", "is_gated", "activation", "padding")
        ),
    ]


def make_table(conv: CausalConv) -> CausalConvTable:
    """Valid while the layer's tensors live."""
    kernel_size, num_channels = conv.weight.shape
    return CausalConvTable(
        weight=conv.weight.data_ptr(),
        bias=None if conv.bias is None else conv.bias.data_ptr(),
        offset=conv.offset,
        num_channels=num_channels,
        kernel_size=kernel_size,
        first=conv.first,
        is_gated=conv.is_gated,
        activation=number_activation(conv.activation),
    )


def causal_conv_reference(conv: CausalConv, states: RequestStates, x: Tensor) -> Tensor:
    """y [T, C] of rows x [T, ...]; states are advanced and saved."""
    num_channels, kept = conv.weight.shape[1], len(conv.weight) - 1
    wide = x.float()
    u = wide[:, conv.first : conv.first + num_channels]
    if conv.is_gated:
        u = u * wide[:, :num_channels]
    y = torch.empty_like(u)
    places = slice(conv.offset, conv.offset + conv.state_size)
    weight = conv.weight.t().unsqueeze(1)  # [C, 1, kernel_size]
    for run in states.list_runs():
        own = states.states[run.slot, places]
        state = (torch.zeros_like(own) if run.begins else own).view(kept, num_channels)
        rows = torch.cat([state, u[run.first : run.end]])
        y[run.first : run.end] = F.conv1d(rows.t(), weight, conv.bias, groups=num_channels).t()
        own.copy_(rows[len(rows) - kept :].flatten())
        for slot in run.saves:
            states.states[slot, places] = own
    if conv.activation is not None:
        y = F.silu(y)
    if conv.is_gated:
        y *= wide[:, num_channels : 2 * num_channels]
    return y.to(x.dtype)


def launch_causal_conv(library: ctypes.CDLL, conv: CausalConv, states: RequestStates, x: Tensor) -> Tensor:
    """The same on the CPU, of contiguous rows."""
    y = x.new_empty((len(x), conv.weight.shape[1]))
    tables: tuple[CausalConvTable, StatesTable] = make_table(conv), states.to_table()
    is_bf16 = x.dtype is torch.bfloat16
    library.quire_causal_conv(is_bf16, *map(ctypes.byref, tables), x, x.stride(0), y)
    return y
