"""mamba2 on a GPU; formula and bytes in mamba2.py.

A program has some columns of a head's state of a request in registers and takes its tokens in their order: a
request's bits depend on itself alone.
"""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.launch_sizes import next_power_of_2
from .mamba2 import Mamba2
from .states import RequestStates

_jit: typing.Any = triton.jit

_COLUMNS = 16  # of a program; a head's are a multiple of it


@_jit
def _mamba2(
    x: typing.Any,
    dt: typing.Any,
    rate: typing.Any,
    shift: typing.Any,
    skip: typing.Any,
    y: typing.Any,
    states: typing.Any,
    slots: typing.Any,
    query_starts: typing.Any,
    seq_lens: typing.Any,
    save_starts: typing.Any,
    save_tokens: typing.Any,
    save_slots: typing.Any,
    slot_size: int,
    x_stride: int,
    dt_stride: int,
    num_heads: int,
    num_groups: int,
    least_step: float,
    most_step: float,
    P: tl.constexpr,
    N: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    if first == end:
        return
    rows, columns = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < N, columns < P
    is_there = is_row[:, None] & (columns < PADDED)[None, :]
    places = (head * N + rows[:, None]) * PADDED + columns[None, :]
    own = states + tl.load(slots + request).to(tl.int64) * slot_size + places
    num_before = tl.load(seq_lens + request) - (end - first)
    state = tl.load(own, mask=is_there & (rows[:, None] * 0 + num_before > 0), other=0.0)
    head_rate, head_shift, head_skip = tl.load(rate + head), tl.load(shift + head), tl.load(skip + head)
    group = head // (num_heads // num_groups)
    save = tl.load(save_starts + request)
    num_saves = tl.load(save_starts + request + 1) - save
    for index in range(0, end - first):
        token = (first + index).to(tl.int64)
        raw = tl.load(dt + token * dt_stride + head).to(tl.float32) + head_shift
        step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        row = x + token * x_stride
        value = tl.load(row + head * P + columns, mask=is_column, other=0.0).to(tl.float32)
        b = row + num_heads * P + group * N + rows
        key = tl.load(b, mask=is_row, other=0.0).to(tl.float32)
        query = tl.load(b + num_groups * N, mask=is_row, other=0.0).to(tl.float32)
        state = state * tl.exp(-head_rate * step) + key[:, None] * (value * step)[None, :]
        out = tl.sum(state * query[:, None], axis=0) + head_skip * value
        target = y + (token * num_heads + head) * P + columns
        tl.store(target, out.to(y.dtype.element_ty), mask=is_column)
        for number in range(0, num_saves):
            if tl.load(save_tokens + save + number) == first + index:
                slot = tl.load(save_slots + save + number).to(tl.int64)
                tl.store(states + slot * slot_size + places, state, mask=is_there)
    tl.store(own, state, mask=is_there)


def launch_mamba2(scan: Mamba2, states: RequestStates, x: Tensor, dt: Tensor) -> Tensor:
    """See `mamba2_reference`; x is contiguous, and dt's columns are neighbours."""
    heads, rows, padded = scan.state_shape
    y = x.new_empty((len(x), heads * scan.head_size))
    _mamba2[len(states.slots), heads, padded // _COLUMNS](
        x,
        dt,
        scan.rate,
        scan.shift,
        scan.skip,
        y,
        states.states[:, scan.offset :],
        states.slots,
        states.query_starts,
        states.seq_lens,
        states.save_starts,
        states.save_tokens,
        states.save_slots,
        states.states.stride(0),
        x.stride(0),
        dt.stride(0),
        heads,
        scan.num_groups,
        *scan.step_limit,
        P=scan.head_size,
        N=rows,
        PADDED=padded,
        ROWS=next_power_of_2(rows),
        COLUMNS=_COLUMNS,
    )
    return y
