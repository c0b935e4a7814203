"""delta_rule on a GPU; formula and bytes in delta_rule.py.

A program has some columns of a head's state of a request in registers and takes its tokens in their order: a
request's bits depend on itself alone.
"""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.launch_sizes import next_power_of_2
from .delta_rule import DeltaRule
from .states import RequestStates

_jit: typing.Any = triton.jit

_STATE_NUMBERS = 4096  # of a program: 32 registers of each thread of 4 warps


@_jit
def _decay_of(x: typing.Any, rate: typing.Any):
    """exp(-rate * log(1 + exp(x)))"""
    small = tl.exp(-tl.abs(x))
    # log(1 + y) = y * log(u) / (u - 1) with u = 1 + y rounded, good where y is small (Higham 1.14.1).
    rounded = 1.0 + small
    exact = tl.where(
        rounded == 1.0, small, small * tl.log(rounded) / tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    )
    return tl.exp(-rate * (exact + tl.maximum(x, 0.0)))


@_jit
def _delta_rule(
    qkv: typing.Any,
    decay: typing.Any,
    beta: typing.Any,
    rate: typing.Any,
    shift: typing.Any,
    y: typing.Any,
    states: typing.Any,
    slots: typing.Any,
    query_starts: typing.Any,
    seq_lens: typing.Any,
    save_starts: typing.Any,
    save_tokens: typing.Any,
    save_slots: typing.Any,
    slot_size: int,
    qkv_stride: int,
    decay_stride: int,
    beta_stride: int,
    num_key_heads: int,
    num_value_heads: int,
    scale: float,
    eps: float,
    K: tl.constexpr,
    V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    IS_TILED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    save, last_save = tl.load(save_starts + request), tl.load(save_starts + request + 1)
    rows, columns = tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < K, columns < V
    places = (head * K + rows[:, None]) * V + columns[None, :]
    is_there = is_row[:, None] & is_column[None, :]
    own = states + tl.load(slots + request).to(tl.int64) * slot_size + places
    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if tl.load(seq_lens + request) > end - first:
        state = tl.load(own, mask=is_there, other=0.0)
    head_rate = tl.load(rate + head)
    key_head = head % num_key_heads if IS_TILED else head * num_key_heads // num_value_heads
    if BY_CHANNEL:
        channel_shift = tl.load(shift + head * K + rows, mask=is_row, other=0.0)
    else:
        channel_shift = tl.load(shift + head)
    start = first.to(tl.int64)
    row, weight, rates = (
        qkv + start * qkv_stride,
        beta + start * beta_stride + head,
        decay + start * decay_stride,
    )
    target = y + (start * num_value_heads + head) * V + columns
    for token in range(first, end):
        query = tl.load(row + key_head * K + rows, mask=is_row, other=0.0).to(tl.float32)
        key = tl.load(row + (num_key_heads + key_head) * K + rows, mask=is_row, other=0.0).to(tl.float32)
        values = row + 2 * num_key_heads * K + head * V
        value = tl.load(values + columns, mask=is_column, other=0.0).to(tl.float32)
        query = query * (scale / tl.sqrt_rn(tl.sum(query * query, axis=0) + eps))
        key = key / tl.sqrt_rn(tl.sum(key * key, axis=0) + eps)
        if BY_CHANNEL:
            channels = tl.load(rates + head * K + rows, mask=is_row, other=0.0).to(tl.float32)
            state = state * _decay_of(channels + channel_shift, head_rate)[:, None]
        else:
            state = state * _decay_of(tl.load(rates + head).to(tl.float32) + channel_shift, head_rate)
        strength = 1.0 / (1.0 + tl.exp(-tl.load(weight).to(tl.float32)))
        delta = (value - tl.sum(state * key[:, None], axis=0)) * strength
        state = state + key[:, None] * delta[None, :]
        out = tl.sum(state * query[:, None], axis=0)
        tl.store(target, out.to(y.dtype.element_ty), mask=is_column)
        for index in range(save, last_save):
            if tl.load(save_tokens + index) == token:
                slot = tl.load(save_slots + index).to(tl.int64)
                tl.store(states + slot * slot_size + places, state, mask=is_there)
        row, weight, rates = row + qkv_stride, weight + beta_stride, rates + decay_stride
        target += num_value_heads * V
    if first < end:
        tl.store(own, state, mask=is_there)


def launch_delta_rule(
    rule: DeltaRule, states: RequestStates, qkv: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """See `delta_rule_reference`; columns of the inputs are neighbours."""
    y = qkv.new_empty((len(qkv), rule.num_value_heads * rule.value_size))
    rows = next_power_of_2(rule.key_size)
    columns = min(next_power_of_2(rule.value_size), max(1, _STATE_NUMBERS // rows))
    grid = len(states.slots), rule.num_value_heads, -(-rule.value_size // columns)
    _delta_rule[grid](
        qkv,
        decay,
        beta,
        rule.rate,
        rule.shift,
        y,
        states.states[:, rule.offset :],
        states.slots,
        states.query_starts,
        states.seq_lens,
        states.save_starts,
        states.save_tokens,
        states.save_slots,
        states.states.stride(0),
        qkv.stride(0),
        decay.stride(0),
        beta.stride(0),
        rule.num_key_heads,
        rule.num_value_heads,
        rule.key_size**-0.5,
        1e-6,
        K=rule.key_size,
        V=rule.value_size,
        BY_CHANNEL=rule.by_channel,
        IS_TILED=rule.is_tiled,
        ROWS=rows,
        COLUMNS=columns,
    )
    return y
