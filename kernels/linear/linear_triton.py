"""Linear layer on a GPU with the same bits whatever the number of rows: y = (x W^T) scale + b.

A library picks tiles and splits of K by the number of rows, and with them the order of the sum (Horace He and
Thinking Machines, "Defeating nondeterminism in LLM inference", 2025). Here K is cut into segments by the
weight's shape alone; a segment is one float32 chain of matrix instructions from zero, and segments are added
in order. Few rows compute segments side by side, many rows one after the other: the same sums either way.
W is the left operand, so that its rows fill the instruction's 64 and a lone token wastes none of them.
Bytes: W once for each 128 rows of x; operations 2 m K N. Legend: m rows, K in, N out, S segments.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton import triton_faults
from ..triton.dependent_launch_triton import launch_options, prefetch, wait_for_inputs
from ..triton.launch_sizes import ceil_div

_jit: typing.Any = triton.jit

# Programs that fill a GPU: the 132 multiprocessors of an H100.
_ENOUGH_PROGRAMS = 132
# Tiles of many rows from which they pay: with fewer, most of the GPU would wait.
_ENOUGH_TILES = 48
# Tiles of rows and outputs. Alone or few: the smallest that the matrix units take; many: what fits registers.
_LONE_ROWS, _FEW_ROWS, FEW_OUT = 16, 64, 64
MANY_OUT = 128
_ADD_OUT = 512
_MIN_SEGMENT = 256
_BLOCK_K_BYTES = 128  # of a row of W; a block of K is this wide whatever the number of rows
_LINES = tl.constexpr(4)  # of 128 bytes of each row of W that are on their way before x is there


@dataclass(frozen=True, slots=True)
class Segments:
    """How a weight's K is summed; a function of its shape and type."""

    block_k: int
    size: int  # K of a segment, a multiple of block_k
    count: int


def plan_segments(weight: Tensor) -> Segments:
    """As many segments as it takes to give every multiprocessor work on one row."""
    num_out, num_in = weight.shape
    return plan_segments_of(num_out, num_in, _BLOCK_K_BYTES // weight.element_size())


def plan_segments_of(num_out: int, num_in: int, block_k: int) -> Segments:
    """The same of a weight [num_out, num_in] that is read in steps of `block_k` inputs."""
    wanted = ceil_div(_ENOUGH_PROGRAMS, ceil_div(num_out, FEW_OUT))
    count = max(1, min(wanted, num_in // _MIN_SEGMENT))
    size = ceil_div(ceil_div(num_in, count), block_k) * block_k
    return Segments(block_k, size, ceil_div(num_in, size))


@_jit
def find_few_tile(
    weight: typing.Any, num_out: typing.Any, row_size: typing.Any, first: typing.Any, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LINE: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """int64 (outputs, rows of x) of a program of a grid (tiles of outputs, tiles of rows, any).

    Returns when x is there. Until then W [num_out, row_size] is fetched, from `first` on in its rows, of
    which LINE elements are 128 bytes.
    """
    outs = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    if USE_PDL:
        line = tl.minimum(first + tl.arange(0, _LINES) * LINE, row_size - 1)
        prefetch(weight + tl.minimum(outs, num_out - 1)[:, None] * row_size + line[None, :])
    wait_for_inputs(USE_PDL)
    return outs, rows


@_jit
def find_many_tile(
    m: typing.Any, num_out: typing.Any, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """The same in a grid of all tiles: GROUP tiles of rows pass over the same W while L2 holds it."""
    num_row_tiles, num_out_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    row_tile, out_tile = tl.swizzle2d(
        tl.program_id(0) // num_out_tiles,
        tl.program_id(0) % num_out_tiles,
        num_row_tiles,
        num_out_tiles,
        GROUP,
    )
    outs = (out_tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    rows = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    wait_for_inputs(USE_PDL)
    return outs, rows


@_jit
def store_tile(
    total: typing.Any, y: typing.Any, first: typing.Any, outs: typing.Any, rows: typing.Any, m: typing.Any,
    num_out: typing.Any,
) -> typing.Any:  # fmt: skip
    """Into `y` [any, num_out], where `first` is the place of x's first row."""
    places = (first + rows[None, :]) * num_out + outs[:, None]
    is_there = (outs < num_out)[:, None] & (rows < m)[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=is_there)


@_jit
def _sum_segment(
    x: typing.Any, weight: typing.Any, rows: typing.Any, outs: typing.Any, m: typing.Any, num_out: typing.Any,
    num_in: typing.Any, start: typing.Any, segment_size: typing.Any, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M] of W x^T over K from `start` on."""
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(0, segment_size, BLOCK_K):
        inner = start + step + tl.arange(0, BLOCK_K)
        is_in = inner < num_in
        left = tl.load(
            weight + outs[:, None] * num_in + inner[None, :],
            mask=(outs < num_out)[:, None] & is_in[None, :],
            other=0,
        )
        right = tl.load(
            x + rows[None, :] * num_in + inner[:, None], mask=(rows < m)[None, :] & is_in[:, None], other=0.0
        )
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
    return total


@_jit
def finish(
    total: typing.Any, scale: typing.Any, bias: typing.Any, outs: typing.Any, is_out: typing.Any,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """total * scale + bias, `total` [N of the program, any]."""
    factor = tl.load(scale + outs, mask=is_out, other=0.0)[:, None] if HAS_SCALE else 1.0
    if HAS_BIAS:
        # Written as one operation, because a compiler may join the two in one kernel and not in another.
        return tl.fma(total, factor, tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[:, None])
    return total * factor


@_jit(do_not_specialize=["m"])  # which varies from step to step
def _linear_few(
    x: typing.Any, weight: typing.Any, scale: typing.Any, bias: typing.Any, y: typing.Any, m: typing.Any,
    num_out: typing.Any, num_in: typing.Any, segment_size: typing.Any, IS_WHOLE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """One program a tile and segment. `y` is the result if a segment is the whole, else sums [S, m, N]."""
    segment = tl.program_id(2)
    start = segment * segment_size
    outs, rows = find_few_tile(weight, num_out, num_in, start, BLOCK_M, BLOCK_N, BLOCK_K, USE_PDL)
    total = _sum_segment(
        x, weight, rows, outs, m, num_out, num_in, start, segment_size, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if IS_WHOLE:
        total = finish(total, scale, bias, outs, outs < num_out, HAS_SCALE, HAS_BIAS)
    store_tile(total, y, segment.to(tl.int64) * m, outs, rows, m, num_out)


@_jit(do_not_specialize=["m", "num_segments"])
def _add_segments(
    sums: typing.Any, scale: typing.Any, bias: typing.Any, y: typing.Any, m: typing.Any, num_out: typing.Any,
    num_segments: typing.Any, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """One program a row and BLOCK_N outputs."""
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_out = outs < num_out
    places = row * num_out + outs[:, None]
    is_there = is_out[:, None]
    step = tl.cast(m, tl.int64) * num_out
    total = tl.load(sums + places, mask=is_there, other=0.0)
    for segment in range(1, num_segments):
        total += tl.load(sums + segment * step + places, mask=is_there, other=0.0)
    total = finish(total, scale, bias, outs, is_out, HAS_SCALE, HAS_BIAS)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=is_there)


@_jit(do_not_specialize=["m", "num_segments"])
def _linear_many(
    x: typing.Any, weight: typing.Any, scale: typing.Any, bias: typing.Any, y: typing.Any, m: typing.Any,
    num_out: typing.Any, num_in: typing.Any, segment_size: typing.Any, num_segments: typing.Any,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """One program a tile, segments in turn."""
    outs, rows = find_many_tile(m, num_out, BLOCK_M, BLOCK_N, GROUP, USE_PDL)
    total = _sum_segment(
        x, weight, rows, outs, m, num_out, num_in, 0, segment_size, BLOCK_M, BLOCK_N, BLOCK_K
    )
    for segment in range(1, num_segments):
        start = segment * segment_size
        total += _sum_segment(
            x, weight, rows, outs, m, num_out, num_in, start, segment_size, BLOCK_M, BLOCK_N, BLOCK_K
        )
    total = finish(total, scale, bias, outs, outs < num_out, HAS_SCALE, HAS_BIAS)
    store_tile(total, y, 0, outs, rows, m, num_out)


def find_many_grid(m: int, num_out: int, device: torch.device) -> tuple[int, int]:
    """(tiles for many rows, rows of one); no tiles: those for few rows are faster.

    Before Hopper the operands lie in registers too, where a larger tile's sums leave no room for them.
    """
    block_m = 128 if triton_faults.find_capability(device) >= (9, 0) else 64
    count = ceil_div(m, block_m) * ceil_div(num_out, MANY_OUT)
    return (count if m > _FEW_ROWS and count >= _ENOUGH_TILES else 0), block_m


def find_few_grid(m: int, num_out: int, num_segments: int) -> tuple[tuple[int, int, int], int]:
    """The grid of tiles for few rows and segments, and the rows of a tile."""
    block_m = _LONE_ROWS if m <= _LONE_ROWS else _FEW_ROWS
    return (ceil_div(num_out, FEW_OUT), ceil_div(m, block_m), num_segments), block_m


def add_segments(sums: Tensor, y: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
    """y [m, N] of the sums [S, m, N] of segments."""
    m, num_out = y.shape
    _add_segments[(m, ceil_div(num_out, _ADD_OUT))](
        *(sums, y if scale is None else scale, y if bias is None else bias, y, m, num_out, sums.shape[0]),
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        BLOCK_N=_ADD_OUT,
        **launch_options(y.device),
    )


def launch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """y [m, N] of x's type for contiguous x [m, K] and weight [N, K]; a row's bits depend on the row alone.

    The weight is of x's type, or int8 with `scale` float32 [N].
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert (scale is not None) == (weight.dtype is torch.int8)
    m, num_out = x.shape[0], weight.shape[0]
    y = x.new_empty((m, num_out))
    if m == 0:
        return y
    segments = plan_segments(weight)
    constants: dict[str, typing.Any] = {
        "HAS_SCALE": scale is not None,
        "HAS_BIAS": bias is not None,
        "BLOCK_K": segments.block_k,
        **launch_options(x.device),
    }
    extra = y if scale is None else scale, y if bias is None else bias  # not read where there is none
    num_tiles, block_m = find_many_grid(m, num_out, x.device)
    if num_tiles:
        _linear_many[(num_tiles,)](
            *(x, weight, *extra, y, m, num_out, x.shape[1], segments.size, segments.count),
            **constants,
            BLOCK_M=block_m,
            BLOCK_N=MANY_OUT,
            GROUP=8,
            num_warps=8,
            num_stages=4,
        )
        return y
    is_whole = segments.count == 1
    sums = y if is_whole else x.new_empty((segments.count, m, num_out), dtype=torch.float32)
    grid, block_m = find_few_grid(m, num_out, segments.count)
    _linear_few[grid](
        *(x, weight, *extra, sums, m, num_out, x.shape[1], segments.size),
        **constants,
        IS_WHOLE=is_whole,
        BLOCK_M=block_m,
        BLOCK_N=FEW_OUT,
        num_warps=4,
        num_stages=6 if scale is None else 5,  # narrow tiles of W beside 64 rows: an L4 has 99 KB
    )
    if not is_whole:
        add_segments(sums, y, scale, bias)
    return y
