"""pool_rows on a GPU; formula and bytes in pool_rows.py."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import FUSED
from ..triton.launch_sizes import ceil_div
from .pool_rows import POOLS

_jit: typing.Any = triton.jit

_BLOCK = 128  # columns of a program, which goes through a row's tokens one by one


@_jit
def _pool_rows(
    hidden: typing.Any,
    rows: typing.Any,
    starts: typing.Any,
    firsts: typing.Any,
    pools: typing.Any,
    pool: int,
    num_pools: int,
    size: int,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and BLOCK columns, of one pool. KIND is the place in POOLS."""
    place = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts + place), tl.load(starts + place + 1)
    first = tl.load(firsts + place)
    row_pool = pools + (tl.load(rows + place) * num_pools + pool) * size + columns
    total = tl.load(row_pool, mask=columns < size, other=0.0)
    begin = end - 1 if KIND == 1 else start
    for t in range(begin, end):
        x = tl.load(hidden + t * size + columns, mask=columns < size, other=0.0).to(tl.float32)
        position = first + t - start
        if KIND == 0:
            later = total
        elif KIND == 1:
            later = x
        elif KIND == 3:
            later = tl.where((total >= x) | (total != total), total, x)
        elif KIND == 4:
            later = total + (position + 1).to(tl.float32) * x
        else:
            later = total + x
        total = tl.where(position == 0, x, later)
    tl.store(row_pool, total, mask=columns < size)


def launch_pool_rows(
    hidden: Tensor, rows: Tensor, starts: Tensor, firsts: Tensor, kinds: Sequence[str], pools: Tensor
) -> None:
    """As `pool_rows_reference`, with int64 `rows`, `starts` and `firsts` on the device."""
    assert hidden.is_contiguous()
    size, num_rows = hidden.shape[1], rows.shape[0]
    if not num_rows:
        return
    grid = (num_rows, ceil_div(size, _BLOCK))
    for pool, kind in enumerate(kinds):
        _pool_rows[grid](
            *(hidden, rows, starts, firsts, pools, pool, len(kinds), size),
            KIND=POOLS.index(kind),
            BLOCK=_BLOCK,
            **FUSED,
        )
