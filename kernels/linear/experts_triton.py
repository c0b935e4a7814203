"""Experts on a GPU: products of all experts in one launch, grouped on the device; the host waits for nothing.

Formula in experts.py; weights are plain, stacked over experts. The T K places of tokens and their experts are
sorted by expert. A program computes a tile of an expert's places; which one, it reads from where they end. A
launch has as many programs as the worst distribution has tiles: those left over end at once.
A number is one float32 chain over its inputs in steps of a fixed width, whatever stands beside it, and the
results of a token are added over rising experts: a row's bits depend on the row alone.
Bytes: the weights of each expert that some token goes to, once for each 64 of its tokens.
Legend: T tokens, E experts, K experts a token, H hidden size, F width of an expert.
"""

from __future__ import annotations

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import ceil_div, next_power_of_2
from .gated_activation_triton import launch_gated_activation

_jit: typing.Any = triton.jit

_FEW_ROWS, _MANY_ROWS = 16, 64  # of a tile; the smallest that the matrix units take, and what fits registers
_OUT = 64
_BLOCK_K_BYTES = 128
_ADD_OUT = 512


@_jit(do_not_specialize=["per_token"])
def _multiply_grouped(
    x: typing.Any, weight: typing.Any, bias: typing.Any, order: typing.Any, ends: typing.Any, y: typing.Any,
    per_token: typing.Any, num_out: typing.Any, num_in: typing.Any, num_experts: typing.Any,
    READS_TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """Grid (tiles of places, tiles of outputs). `ends` int32 [E]: where each expert's places end.

    READS_TOKENS: x has a row a token and y a row a place, in their order by expert; else x has those rows and
    y one a token and choice, as `order` says.
    """
    wait_for_inputs(USE_PDL)
    # 1. Which expert, and which of its places.
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    last = tl.load(ends + experts, mask=is_expert, other=0)
    first = tl.load(ends + experts - 1, mask=is_expert & (experts > 0), other=0)
    tiles = tl.cumsum(tl.where(is_expert, (last - first + BLOCK_M - 1) // BLOCK_M, 0), 0)
    tile = tl.program_id(0)
    expert = tl.sum((tiles <= tile).to(tl.int32), 0)
    if expert >= num_experts:
        return
    is_one = experts == expert
    begin = tl.sum(tl.where(is_one, first, 0), 0)
    end = tl.sum(tl.where(is_one, last, 0), 0)
    before = tl.sum(tl.where(experts + 1 == expert, tiles, 0), 0)
    places = begin + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_place = places < end
    choices = tl.load(order + places, mask=is_place, other=0)
    rows = (choices // per_token if READS_TOKENS else places).to(tl.int64)
    targets = (places if READS_TOKENS else choices).to(tl.int64)
    # 2. The products.
    outs = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_out = outs < num_out
    of_expert = weight + expert.to(tl.int64) * num_out * num_in
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, num_in, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        is_in = inner < num_in
        left = tl.load(
            of_expert + outs[:, None] * num_in + inner[None, :],
            mask=is_out[:, None] & is_in[None, :],
            other=0.0,
        )
        right = tl.load(
            x + rows[None, :] * num_in + inner[:, None], mask=is_place[None, :] & is_in[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + expert * num_out + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    y_at = y + targets[None, :] * num_out + outs[:, None]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_out[:, None] & is_place[None, :])


@_jit(do_not_specialize=["per_token"])
def _add_weighted(
    parts: typing.Any, weights: typing.Any, y: typing.Any, per_token: typing.Any, size: typing.Any,
    IS_WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """One program a token and BLOCK numbers: the sum of its parts [T, K, H] in float32, rounded once."""
    wait_for_inputs(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in range(0, per_token):
        place = token * per_token + choice
        part = tl.load(parts + place * size + columns, mask=is_there, other=0.0).to(tl.float32)
        total += part * tl.load(weights + place) if IS_WEIGHTED else part
    tl.store(y + token * size + columns, total.to(y.dtype.element_ty), mask=is_there)


def launch_grouped_experts(
    x: Tensor,
    choices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    scales_inputs: bool = False,
) -> Tensor:
    """[T, H] for contiguous x [T, H] and what `route_reference` gives, [T, K] each.

    `gate_up` is [E, 2 F, H], `down` [E, H, F], their biases [E, 2 F] and [E, H]; all are of x's type.
    """
    num_tokens, hidden = x.shape
    num_experts, per_token = len(down), choices.shape[1]
    y = torch.empty_like(x)
    if num_tokens == 0:
        return y
    flat = choices.flatten()
    order = flat.argsort(stable=True).int()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    num_places = num_tokens * per_token
    wide = x.new_empty((num_places, gate_up.shape[1]))
    parts = x.new_empty((num_places, hidden))
    # An expert's input is a row a place where it is weighed, else a row a token.
    inputs, reads = x, per_token
    if scales_inputs:
        inputs, reads = (x.float().unsqueeze(1) * weights.unsqueeze(2)).to(x.dtype).view(-1, hidden), 1
    multiply_grouped(inputs, gate_up, gate_up_bias, order, ends, wide, reads, True)
    multiply_grouped(
        launch_gated_activation(wide, activation), down, down_bias, order, ends, parts, per_token, False
    )
    _add_weighted[(num_tokens, ceil_div(hidden, _ADD_OUT))](
        *(parts, weights, y, per_token, hidden),
        IS_WEIGHTED=not scales_inputs,
        BLOCK=_ADD_OUT,
        **launch_options(x.device),
    )
    return y


def multiply_grouped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    y: Tensor,
    per_token: int,
    reads_tokens: bool,
) -> None:
    """y of x and the stacked weights [E, out, in], as `_multiply_grouped` says; `order`, `ends` are int32."""
    num_experts, num_out, num_in = weight.shape
    num_places = len(order)
    block_m = _FEW_ROWS if num_places <= _FEW_ROWS * num_experts else _MANY_ROWS
    num_tiles = min(num_places, num_experts) + num_places // block_m
    _multiply_grouped[(num_tiles, ceil_div(num_out, _OUT))](
        *(x, weight, y if bias is None else bias, order, ends, y),
        *(per_token, num_out, num_in, num_experts),
        READS_TOKENS=reads_tokens,
        HAS_BIAS=bias is not None,
        EXPERTS=next_power_of_2(num_experts),
        BLOCK_M=block_m,
        BLOCK_N=_OUT,
        BLOCK_K=_BLOCK_K_BYTES // x.element_size(),
        num_warps=4,
        num_stages=4,
        **launch_options(x.device),
    )
