"""rms_norm on a GPU; formula and bytes in rms_norm.py.

One program a row, whatever their number: a row's bits depend on the row alone.
"""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import next_power_of_2

_jit: typing.Any = triton.jit

MAX_ROW_SIZE = 1 << 15  # a row is held in registers: 32 float32 a thread at 32 warps


@_jit
def _rms_norm(
    x: typing.Any,
    residual: typing.Any,
    weight: typing.Any,
    y: typing.Any,
    size: int,
    stride: int,
    eps: float,
    weight_offset: float,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Each step is rounded to the type of x where the reference rounds it."""
    columns = tl.arange(0, BLOCK)
    is_there = columns < size
    start = tl.program_id(0).to(tl.int64) * stride
    weights = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)
    values = tl.load(x + start + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + start + columns, mask=is_there, other=0.0).to(tl.float32)
        total = values.to(residual.dtype.element_ty)
        tl.store(residual + start + columns, total, mask=is_there)
        values = total.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / size  # pyright: ignore[reportOperatorIssue]
    scale = 1.0 / tl.sqrt_rn(mean + eps)
    normed = values * scale
    if ROUNDS_NORMED:
        normed = normed.to(y.dtype.element_ty).to(tl.float32)
    product = normed * (weights + weight_offset)
    tl.store(y + start + columns, product.to(y.dtype.element_ty), mask=is_there)


def launch_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    rounds_normed: bool = True,
    in_place: bool = False,
) -> Tensor:
    """Norm of x, or of x + residual where `residual` is given and overwritten by that sum.

    All contiguous [T, D] (the weight [D]) of one type; D at most MAX_ROW_SIZE. With `in_place`, which is
    without a residual, the result is x, which may be some columns of a larger tensor.
    """
    assert x.stride(1) == 1 if in_place else x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    rows, size = x.shape
    y = x if in_place else x.new_empty((rows, size))
    if rows:
        block = next_power_of_2(size)
        _rms_norm[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            y,
            size,
            x.stride(0) if in_place else size,
            eps,
            weight_offset,
            ROUNDS_NORMED=rounds_normed,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 1024, 1), 32),
            **launch_options(x.device),
        )
    return y
