"""The recurrence of Mamba-2 (arXiv 2405.21060, section 6), of each head by itself, with the state S [N, P]:

    dt = min(max(softplus(dt + shift), least), most)
    S = exp(-rate dt) S + B (dt x)^T;  y = S^T C + skip x

token by token, in float32; heads of a group share B and C. This order of tokens is the only arithmetic, for
prompts too: chunks, batches and threads change no bit. Bytes: the states once in each direction for all
tokens of a request. Legend: T tokens, H heads of P numbers, G groups of N rows.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .states import RequestStates

_COLUMNS, _PADDING = 32, 16  # kBlock and kPadding of mamba2.cpp


class Mamba2(NamedTuple):
    """A layer's numbers and sizes. Its state is [H, N, P] with P rounded up to 16, from `offset` on."""

    rate: Tensor  # float32 [H], as shift and skip
    shift: Tensor
    skip: Tensor
    head_size: int
    num_groups: int
    num_rows: int
    step_limit: tuple[float, float] = (0.0, float("inf"))
    offset: int = 0

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of the padded state."""
        return len(self.rate), self.num_rows, -(-self.head_size // _PADDING) * _PADDING

    @property
    def state_size(self) -> int:
        """Numbers of a request's state."""
        heads, rows, columns = self.state_shape
        return heads * rows * columns

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H, P], B and C [T, G, N] of rows [T, H P + 2 G N]."""
        inner, width = len(self.rate) * self.head_size, self.num_groups * self.num_rows
        parts = x.split((inner, width, width), dim=1)
        sizes = self.head_size, self.num_rows, self.num_rows
        first, b, c = (part.unflatten(1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
        return first, b, c


class Mamba2Table(ctypes.Structure):
    """QuireMamba2."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rate", "shift", "skip")),
        ("offset", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_heads", "head_size", "num_groups", "num_rows")),
        *((name, ctypes.c_float) for name in ("least_step", "most_step")),
    ]


def make_table(scan: Mamba2) -> Mamba2Table:
    """Valid while the layer's tensors live."""
    return Mamba2Table(
        rate=scan.rate.data_ptr(),
        shift=scan.shift.data_ptr(),
        skip=scan.skip.data_ptr(),
        offset=scan.offset,
        num_heads=len(scan.rate),
        head_size=scan.head_size,
        num_groups=scan.num_groups,
        num_rows=scan.num_rows,
        least_step=scan.step_limit[0],
        most_step=scan.step_limit[1],
    )


def mamba2_reference(scan: Mamba2, states: RequestStates, x: Tensor, dt: Tensor) -> Tensor:
    """y [T, H * P] of rows x [T, H P + 2 G N] and dt [T, H]; states [H, N, P] are advanced and saved."""
    heads, _, columns = scan.state_shape
    wide, b, c = scan.split(x.float())
    b, c = (part.repeat_interleave(heads // scan.num_groups, 1) for part in (b, c))
    step = F.softplus(dt.float() + scan.shift).clamp(*scan.step_limit)
    decay, y = torch.exp(-scan.rate * step), torch.empty_like(wide)
    inputs = F.pad(wide * step.unsqueeze(2), (0, columns - scan.head_size))
    places = slice(scan.offset, scan.offset + scan.state_size)
    for run in states.list_runs():
        own = states.states[run.slot, places]
        state = (torch.zeros_like(own) if run.begins else own).view(scan.state_shape)
        for token in range(run.first, run.end):
            state = state * decay[token, :, None, None] + b[token].unsqueeze(2) * inputs[token].unsqueeze(1)
            y[token] = torch.einsum("hnp,hn->hp", state, c[token])[:, : scan.head_size]
        own.copy_(state.flatten())
        for slot in run.saves:
            states.states[slot, places] = own
    return (y + scan.skip[:, None] * wide).flatten(1).to(x.dtype)


def launch_mamba2(library: ctypes.CDLL, scan: Mamba2, states: RequestStates, x: Tensor, dt: Tensor) -> Tensor:
    """The same on the CPU, of contiguous x; dt's columns are neighbours. States lie as `from_native_state`
    says.
    """
    y = x.new_empty((len(x), len(scan.rate) * scan.head_size))
    tables, is_bf16 = (make_table(scan), states.to_table()), x.dtype is torch.bfloat16
    library.quire_mamba2(is_bf16, *map(ctypes.byref, tables), x, dt, dt.stride(0), y)
    return y


def from_native_state(scan: Mamba2, state: Tensor) -> Tensor:
    """[H, N, P] of a state of `launch_mamba2`: blocks of some columns, each [N, columns]."""
    heads = state.view(len(scan.rate), -1)
    blocks = heads.split(scan.num_rows * _COLUMNS, dim=1)
    whole = torch.cat([block.unflatten(1, (scan.num_rows, -1)) for block in blocks], dim=2)
    return whole[:, :, : scan.head_size]
