"""log_totals on a GPU; formula and bytes in log_totals.py.

Chunks of a row are summed side by side, each from its own maximum, and added up in order: a row's bits depend
on the row alone.
"""

from __future__ import annotations

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import FUSED
from ..triton.launch_sizes import ceil_div, next_power_of_2

_jit: typing.Any = triton.jit

_CHUNK = 4096


@_jit
def _sum_chunks(
    logits: typing.Any,
    token_ids: typing.Any,
    tops: typing.Any,
    sums: typing.Any,
    counts: typing.Any,
    size: int,
    num_chunks: int,
    CHUNK: tl.constexpr,
):
    """Of each chunk: maximum, sum of exp(x - maximum), number of logits above the row's token."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * size + ids, mask=ids < size, other=-float("inf"))
    chosen = tl.load(logits + row * size + tl.load(token_ids + row))
    top = tl.max(values, axis=0)
    weights = tl.exp(values - tl.where(top == -float("inf"), 0.0, top))
    place = row * num_chunks + chunk
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(weights, axis=0))
    tl.store(counts + place, tl.sum((values > chosen).to(tl.int32), axis=0))


@_jit
def _add_chunks(
    tops: typing.Any,
    sums: typing.Any,
    counts: typing.Any,
    log_totals: typing.Any,
    ranks: typing.Any,
    num_chunks: int,
    PADDED_CHUNKS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    is_there = chunks < num_chunks
    places = row * num_chunks + chunks
    own_tops = tl.load(tops + places, mask=is_there, other=-float("inf")).to(tl.float64)
    top = tl.max(own_tops, axis=0)
    parts = tl.load(sums + places, mask=is_there, other=0.0).to(tl.float64) * tl.exp(own_tops - top)
    tl.store(log_totals + row, top + tl.log(tl.sum(parts, axis=0)))
    num_above = tl.load(counts + places, mask=is_there, other=0)
    tl.store(ranks + row, tl.sum(num_above, axis=0) + 1)  # pyright: ignore[reportOperatorIssue]


def launch_log_totals(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(float64 [S], int32 [S]) of contiguous float32 `logits` [S, V] and int64 `token_ids` [S], all below V.

    The numbers of a row whose maximum is not finite have no meaning.
    """
    assert logits.is_contiguous()
    assert token_ids.is_contiguous()
    num_rows, size = logits.shape
    num_chunks = ceil_div(size, _CHUNK)
    tops = logits.new_empty((num_rows, num_chunks))
    sums = torch.empty_like(tops)
    counts = torch.empty_like(tops, dtype=torch.int32)
    log_totals = logits.new_empty(num_rows, dtype=torch.float64)
    ranks = logits.new_empty(num_rows, dtype=torch.int32)
    if num_rows:
        _sum_chunks[(num_chunks, num_rows)](
            logits, token_ids, tops, sums, counts, size, num_chunks, CHUNK=_CHUNK, **FUSED
        )
        _add_chunks[(num_rows,)](
            tops,
            sums,
            counts,
            log_totals,
            ranks,
            num_chunks,
            PADDED_CHUNKS=next_power_of_2(num_chunks),
            **FUSED,
        )
    return log_totals, ranks
