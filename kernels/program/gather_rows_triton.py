"""gather_rows on a GPU; formula and bytes in gather_rows.py."""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import ceil_div, next_power_of_2

_jit: typing.Any = triton.jit

_MAX_BLOCK = 2048  # columns of a program: 16 bytes a thread at 4 warps in 16 bits


@_jit
def _gather_rows(
    table: typing.Any,
    index: typing.Any,
    y: typing.Any,
    size: int,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(USE_PDL)
    source = tl.load(index + row)
    values = tl.load(table + source * size + columns, mask=columns < size)
    tl.store(y + row * size + columns, values, mask=columns < size)


def launch_gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """[n, D] for contiguous `table` and int64 `index`; what lies outside the table is not checked."""
    assert table.is_contiguous()
    assert index.is_contiguous()
    size = table.shape[1]
    y = table.new_empty((index.shape[0], size))
    if y.numel():
        block = min(_MAX_BLOCK, next_power_of_2(size))
        _gather_rows[(index.shape[0], ceil_div(size, block))](
            table, index, y, size, BLOCK=block, **launch_options(table.device)
        )
    return y
