"""layer_norm on a GPU; formula and bytes in layer_norm.py.

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


@_jit
def _layer_norm(
    x: typing.Any,
    residual: typing.Any,
    weight: typing.Any,
    bias: typing.Any,
    y: typing.Any,
    size: int,
    eps: float,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_there = columns < size
    start = tl.program_id(0).to(tl.int64) * size
    weights = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    wait_for_inputs(USE_PDL)
    values = tl.load(x + start + columns, mask=is_there, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + start + columns, mask=is_there, other=0.0).to(tl.float32)
        tl.store(residual + start + columns, values.to(residual.dtype.element_ty), mask=is_there)
    mean = tl.sum(values, axis=0) / size  # pyright: ignore[reportOperatorIssue]
    centered = tl.where(is_there, values - mean, 0.0)
    variance = tl.sum(centered * centered, axis=0) / size  # pyright: ignore[reportOperatorIssue]
    scaled = centered * (1.0 / tl.sqrt_rn(variance + eps))
    scaled *= weights
    if HAS_BIAS:
        scaled += tl.load(bias + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(y + start + columns, scaled.to(y.dtype.element_ty), mask=is_there)


def launch_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Norm of x, or of x + residual where `residual` is given and overwritten by that sum.

    All contiguous [T, D] (weight and bias [D]) of one type; D at most rms_norm_triton.MAX_ROW_SIZE.
    """
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    rows, size = x.shape
    y = x.new_empty((rows, size))
    if rows:
        block = next_power_of_2(size)
        _layer_norm[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            weight if bias is None else bias,
            y,
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=min(max(block // 1024, 1), 32),
            **launch_options(x.device),
        )
    return y
