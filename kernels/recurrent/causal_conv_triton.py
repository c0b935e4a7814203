"""causal_conv on a GPU; formula and bytes in causal_conv.py.

A program takes all tokens of a request for some channels. Each token's sum is made of rows that are read
again, of the step or of the state, so a request's bits depend on itself alone.
"""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from .causal_conv import CausalConv
from .states import RequestStates

_jit: typing.Any = triton.jit

_BLOCK = 128  # channels


@_jit
def _load_row(
    x: typing.Any,
    own: typing.Any,
    token: typing.Any,
    first: typing.Any,
    has_state: typing.Any,
    channels: typing.Any,
    is_there: typing.Any,
    stride: int,
    num_channels: int,
    FIRST: tl.constexpr,
    KEPT: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> typing.Any:
    """What a token gives to the convolution; those before the step's first one have left it in the state."""
    is_new = is_there & (channels * 0 + token >= first)
    row = x + token.to(tl.int64) * stride + channels
    new = tl.load(row + FIRST, mask=is_new, other=0.0).to(tl.float32)
    if IS_GATED:
        new *= tl.load(row, mask=is_new, other=0.0).to(tl.float32)
    old = own + (token - first + KEPT) * num_channels + channels
    is_old = is_there & (channels * 0 + token < first) & (channels * 0 + has_state > 0)
    return tl.where(is_new, new, tl.load(old, mask=is_old, other=0.0))


@_jit
def _causal_conv(
    x: typing.Any,
    weight: typing.Any,
    bias: typing.Any,
    y: typing.Any,
    states: typing.Any,
    slots: typing.Any,
    query_starts: typing.Any,
    seq_lens: typing.Any,
    save_starts: typing.Any,
    save_tokens: typing.Any,
    save_slots: typing.Any,
    slot_size: int,
    stride: int,
    num_channels: int,
    FIRST: tl.constexpr,
    KERNEL: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, block = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(query_starts + request), tl.load(query_starts + request + 1)
    if first == end:
        return
    channels = block * BLOCK + tl.arange(0, BLOCK)
    is_there = channels < num_channels
    own = states + tl.load(slots + request).to(tl.int64) * slot_size
    has_state = tl.load(seq_lens + request) - (end - first)  # tokens before
    KEPT: tl.constexpr = KERNEL - 1
    for index in range(0, end - first):
        token = first + index
        total = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=is_there, other=0.0)
        for k in tl.static_range(KERNEL):  # pyright: ignore[reportGeneralTypeIssues]
            row = _load_row(
                x, own, token - KEPT + k, first, has_state, channels, is_there, stride, num_channels,
                FIRST, KEPT, IS_GATED,
            )  # fmt: skip
            total += tl.load(weight + k * num_channels + channels, mask=is_there, other=0.0) * row
        if IS_SILU:
            total = total / (1.0 + tl.exp(-total))
        if IS_GATED:
            after = x + token.to(tl.int64) * stride + num_channels + channels
            total *= tl.load(after, mask=is_there, other=0.0).to(tl.float32)
        target = y + token.to(tl.int64) * num_channels + channels
        tl.store(target, total.to(y.dtype.element_ty), mask=is_there)
    # The own state is written last, row by row from the oldest: what is read of it for a row is newer.
    save = tl.load(save_starts + request)
    num_saves = tl.load(save_starts + request + 1) - save
    for index in range(0, num_saves + 1):
        token, to = end - 1, own
        if index < num_saves:
            token = tl.load(save_tokens + save + index)
            to = states + tl.load(save_slots + save + index).to(tl.int64) * slot_size
        for k in tl.static_range(KEPT):  # pyright: ignore[reportGeneralTypeIssues]
            row = _load_row(
                x, own, token - KEPT + 1 + k, first, has_state, channels, is_there, stride, num_channels,
                FIRST, KEPT, IS_GATED,
            )  # fmt: skip
            tl.store(to + k * num_channels + channels, row, mask=is_there)


def launch_causal_conv(conv: CausalConv, states: RequestStates, x: Tensor) -> Tensor:
    """See `causal_conv_reference`; x is contiguous."""
    kernel_size, num_channels = conv.weight.shape
    y = x.new_empty((len(x), num_channels))
    _causal_conv[len(states.slots), -(-num_channels // _BLOCK)](
        x,
        conv.weight,
        conv.weight if conv.bias is None else conv.bias,
        y,
        states.states[:, conv.offset :],
        states.slots,
        states.query_starts,
        states.seq_lens,
        states.save_starts,
        states.save_tokens,
        states.save_slots,
        states.states.stride(0),
        x.stride(0),
        num_channels,
        FIRST=conv.first,
        KERNEL=kernel_size,
        IS_GATED=conv.is_gated,
        HAS_BIAS=conv.bias is not None,
        IS_SILU=conv.activation == "silu",
        BLOCK=_BLOCK,
    )
    return y
