"""Linear layer on a GPU whose weight has codes of 4 or 8 bits in groups, or fp8: y = x W^T + b.

Codes become numbers of x's type in registers, each rounded as `dequantize` rounds it, and go to the matrix
units from there, so that few rows of x cost the bytes of the codes. Sums are cut into segments by the
weight's shape, as in linear_triton.py, so a row's bits do not depend on the number of rows.
Bytes: W's codes and scales once for each 128 rows of x; operations 2 m K N.
Legend: m rows, K in, N out, G groups of inputs of an output, S segments.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..triton.dependent_launch_triton import launch_options
from .linear_triton import (
    FEW_OUT,
    MANY_OUT,
    Segments,
    add_segments,
    find_few_grid,
    find_few_tile,
    find_many_grid,
    find_many_tile,
    finish,
    plan_segments_of,
    store_tile,
)

_jit: typing.Any = triton.jit

INT4, INT8, FP8, CODEBOOK = range(4)  # what a code is; of the last, 4 bits are a place in a table of 16
_HALVES = (64, 32, 16)  # codes of an output that are multiplied together, all of one group
# Of a thread: without the bound ptxas keeps to 80 on sm_80 and spills. Four programs of a processor have it.
_LONE_REGISTERS = 128
_REPACK_CODES = 1 << 25  # that are unpacked at a time


@dataclass(frozen=True, slots=True, eq=False)
class TritonNarrowWeight:
    """A weight as the kernels read it.

    Of 4 bits, a byte of `codes` holds the codes of k (low) and k + half, for k in the first half of each
    2 half inputs; rows are padded to whole ones of these. Groups are the rows of `scales` and `offsets`.
    """

    kind: int
    num_in: int
    group_size: int  # at least 16; K where there is one group
    half: int
    codes: Tensor  # uint8 [N, K or ceil(K / (2 half)) half]
    scales: Tensor  # float32 or bfloat16 [G, N]
    offsets: Tensor | None = None  # float32 [G, N]
    codebook: Tensor | None = None  # float32 [16]
    permutation: Tensor | None = None  # int64 [K]: the input that each k takes

    @property
    def size_bytes(self) -> int:
        """Bytes that it holds."""
        parts = self.codes, self.scales, self.offsets, self.codebook, self.permutation
        return sum(part.nbytes for part in parts if part is not None)


def pack_narrow_weight(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    num_in: int,
    group_size: int = 0,
    offsets: Tensor | None = None,
    codebook: Tensor | None = None,
    permutation: Tensor | None = None,
) -> TritonNarrowWeight:
    """A copy; the arguments are those of `kernels.linear.pack_narrow_linear`."""
    group = group_size or max(16, num_in)
    # One group has all inputs, also those that pad them.
    half = next(each for each in _HALVES if not group_size or group_size % each == 0)
    if codes.dtype == torch.float8_e4m3fn:
        kind, codes = FP8, codes.view(torch.uint8)
    elif bits == 8:
        kind = INT8
    else:
        kind = INT4 if codebook is None else CODEBOOK
        codes = _pair_halves(codes, num_in, half)
    return TritonNarrowWeight(
        kind,
        num_in,
        group,
        half,
        codes.contiguous(),
        scales.t().contiguous(),
        None if offsets is None else offsets.t().contiguous(),
        codebook,
        None if permutation is None else permutation.long(),
    )


def _pair_halves(codes: Tensor, num_in: int, half: int) -> Tensor:
    """Codes of neighbours in a byte as those of inputs that are `half` apart."""
    width = -(-num_in // (2 * half)) * half
    paired = codes.new_empty((len(codes), width))
    step = max(1, _REPACK_CODES // (2 * width))
    for start in range(0, len(codes), step):
        part = codes[start : start + step]
        single = torch.stack((part & 15, part >> 4), dim=2).flatten(1)[:, :num_in]
        single = F.pad(single, (0, 2 * width - num_in)).view(len(part), -1, 2, half)
        paired[start : start + step] = (single[:, :, 0] | single[:, :, 1] << 4).flatten(1)
    return paired


@_jit
def _dequantize(
    codes: typing.Any, k: typing.Any, outs: typing.Any, is_out: typing.Any, num_out: typing.Any,
    num_in: typing.Any, scales: typing.Any, offsets: typing.Any, codebook: typing.Any,
    KIND: tl.constexpr, HAS_OFFSETS: tl.constexpr, GROUP: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """float32 [BLOCK_N, HALF] of codes of inputs from `k` on, which are of one group; rounded once."""
    place = (tl.minimum(k, num_in - 1) // GROUP) * num_out + outs  # a half past the end counts nothing
    scale = tl.load(scales + place, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if KIND == 2:
        # 4 bits of exponent and 3 of mantissa lie in a float16 as they are, 2^8 too small; subnormals too.
        wide = codes.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        units = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        units = tl.where((wide & 0x7F) == 0x7F, float("nan"), units)
    elif KIND == 3:
        units = tl.load(codebook + codes.to(tl.int32))
    elif HAS_OFFSETS:
        units = codes.to(tl.float32)
    else:
        units = codes.to(tl.float32) - (8.0 if KIND == 0 else 128.0)
    if HAS_OFFSETS:
        offset = tl.load(offsets + place, mask=is_out, other=0.0)[:, None]
        return tl.fma(units, tl.broadcast_to(scale, units.shape), tl.broadcast_to(-offset, units.shape))
    return units * scale


@_jit
def _multiply(
    total: typing.Any, codes: typing.Any, k: typing.Any, x: typing.Any, rows: typing.Any, m: typing.Any,
    outs: typing.Any, is_out: typing.Any, num_out: typing.Any, num_in: typing.Any, scales: typing.Any,
    offsets: typing.Any, codebook: typing.Any, KIND: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr,
) -> typing.Any:  # fmt: skip
    inner = k + tl.arange(0, HALF)
    is_in = inner < num_in
    right_at = x + rows[None, :] * num_in + inner[:, None]
    right = tl.load(right_at, mask=(rows < m)[None, :] & is_in[:, None], other=0.0)
    left = _dequantize(
        codes, k, outs, is_out, num_out, num_in, scales, offsets, codebook, KIND, HAS_OFFSETS, GROUP
    )
    return tl.dot(left.to(right.dtype), right, total, input_precision="ieee")


@_jit
def _sum_segment(
    x: typing.Any, codes: typing.Any, scales: typing.Any, offsets: typing.Any, codebook: typing.Any,
    rows: typing.Any, outs: typing.Any, m: typing.Any, num_out: typing.Any, num_in: typing.Any,
    row_bytes: typing.Any, start: typing.Any, segment_size: typing.Any, KIND: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """float32 [BLOCK_N, BLOCK_M] of W x^T over K from `start` on."""
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    is_out = outs < num_out
    place = tl.arange(0, HALF)
    IS_PAIRED: tl.constexpr = (KIND == 0) | (KIND == 3)
    STEP: tl.constexpr = 2 * HALF if IS_PAIRED else HALF
    for step in range(0, segment_size, STEP):
        k = start + step
        at = (k // 2 if IS_PAIRED else k) + place
        loaded = tl.load(
            codes + outs[:, None] * row_bytes + at[None, :],
            mask=is_out[:, None] & (at < row_bytes)[None, :],
            other=0,
        )
        if IS_PAIRED:
            total = _multiply(
                total, loaded & 15, k, x, rows, m, outs, is_out, num_out, num_in, scales, offsets, codebook,
                KIND, HAS_OFFSETS, GROUP, HALF,
            )  # fmt: skip
            total = _multiply(
                total, loaded >> 4, k + HALF, x, rows, m, outs, is_out, num_out, num_in, scales, offsets,
                codebook, KIND, HAS_OFFSETS, GROUP, HALF,
            )  # fmt: skip
        else:
            total = _multiply(
                total, loaded, k, x, rows, m, outs, is_out, num_out, num_in, scales, offsets, codebook,
                KIND, HAS_OFFSETS, GROUP, HALF,
            )  # fmt: skip
    return total


@_jit(do_not_specialize=["m"])
def _narrow_linear_few(
    x: typing.Any, codes: typing.Any, scales: typing.Any, offsets: typing.Any, codebook: typing.Any,
    bias: typing.Any, y: typing.Any, m: typing.Any, num_out: typing.Any, num_in: typing.Any,
    row_bytes: typing.Any, segment_size: typing.Any, KIND: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """One program a tile and segment. `y` is the result if a segment is the whole, else sums [S, m, N]."""
    segment = tl.program_id(2)
    start = segment * segment_size
    first = start // 2 if (KIND == 0) | (KIND == 3) else start
    outs, rows = find_few_tile(codes, num_out, row_bytes, first, BLOCK_M, BLOCK_N, 128, USE_PDL)
    total = _sum_segment(
        x, codes, scales, offsets, codebook, rows, outs, m, num_out, num_in, row_bytes,
        start, segment_size, KIND, HAS_OFFSETS, GROUP, HALF, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    total = finish(total, y, bias, outs, outs < num_out, False, HAS_BIAS)
    store_tile(total, y, segment.to(tl.int64) * m, outs, rows, m, num_out)


@_jit(do_not_specialize=["m", "num_segments"])
def _narrow_linear_many(
    x: typing.Any, codes: typing.Any, scales: typing.Any, offsets: typing.Any, codebook: typing.Any,
    bias: typing.Any, y: typing.Any, m: typing.Any, num_out: typing.Any, num_in: typing.Any,
    row_bytes: typing.Any, segment_size: typing.Any, num_segments: typing.Any, KIND: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_GROUP: tl.constexpr, USE_PDL: tl.constexpr,
) -> typing.Any:  # fmt: skip
    """One program a tile, segments in turn."""
    outs, rows = find_many_tile(m, num_out, BLOCK_M, BLOCK_N, TILE_GROUP, USE_PDL)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for segment in range(0, num_segments):
        total += _sum_segment(
            x, codes, scales, offsets, codebook, rows, outs, m, num_out, num_in, row_bytes,
            segment * segment_size, segment_size, KIND, HAS_OFFSETS, GROUP, HALF, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    total = finish(total, y, bias, outs, outs < num_out, False, HAS_BIAS)
    store_tile(total, y, 0, outs, rows, m, num_out)


def plan_narrow_segments(weight: TritonNarrowWeight) -> Segments:
    """As `linear_triton.plan_segments`."""
    step = 2 * weight.half if weight.kind in (INT4, CODEBOOK) else weight.half
    return plan_segments_of(len(weight.codes), weight.num_in, max(64, step))


def launch_narrow_linear(x: Tensor, weight: TritonNarrowWeight, bias: Tensor | None = None) -> Tensor:
    """y [m, N] of x's type for contiguous x [m, K]; a row's bits depend on the row alone."""
    assert x.is_contiguous()
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    m, num_out = x.shape[0], weight.codes.shape[0]
    y = x.new_empty((m, num_out))
    if m == 0:
        return y
    segments = plan_narrow_segments(weight)
    tensors = (x, weight.codes, weight.scales)
    tables = (y if part is None else part for part in (weight.offsets, weight.codebook))  # some not read
    sizes = (m, num_out, x.shape[1], weight.codes.shape[1], segments.size)
    constants: dict[str, typing.Any] = {
        "KIND": weight.kind,
        "HAS_OFFSETS": weight.offsets is not None,
        "GROUP": weight.group_size,
        "HALF": weight.half,
        **launch_options(x.device),
    }
    no_bias = y if bias is None else bias
    num_tiles, block_m = find_many_grid(m, num_out, x.device)
    if num_tiles:
        _narrow_linear_many[(num_tiles,)](
            *tensors, *tables, no_bias, y, *sizes, segments.count, **constants, HAS_BIAS=bias is not None,
            BLOCK_M=block_m, BLOCK_N=MANY_OUT, TILE_GROUP=8, num_warps=8, num_stages=3,
        )  # fmt: skip
        return y
    is_whole = segments.count == 1
    sums = y if is_whole else x.new_empty((segments.count, m, num_out), dtype=torch.float32)
    grid, block_m = find_few_grid(m, num_out, segments.count)
    _narrow_linear_few[grid](
        *tensors, *tables, no_bias, sums, *sizes, **constants, HAS_BIAS=is_whole and bias is not None,
        BLOCK_M=block_m, BLOCK_N=FEW_OUT, num_warps=4, num_stages=4,
        maxnreg=_LONE_REGISTERS if block_m < FEW_OUT else None,
    )  # fmt: skip
    if not is_whole:
        add_segments(sums, y, None, bias)
    return y
