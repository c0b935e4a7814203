"""token_bitmask on a GPU; layout and bytes in token_bitmask.py. Only what is forbidden is written."""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import FUSED
from ..triton.launch_sizes import ceil_div

_jit: typing.Any = triton.jit

_BLOCK = 4096


@_jit
def _apply_token_bitmask(
    logits: typing.Any, bitmask: typing.Any, rows: typing.Any, size: int, num_words: int, BLOCK: tl.constexpr
):
    """One program a masked row and BLOCK tokens."""
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + place)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmask + place * num_words + ids // 32, mask=ids < size, other=0)
    is_forbidden = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + row * size + ids, -float("inf"), mask=(ids < size) & is_forbidden)


def launch_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Edit contiguous float32 `logits` [S, V] in place: row rows[i] by bitmask[i].

    `bitmask` is a contiguous int32 [R, ceil(V / 32)], `rows` holds distinct int64 [R].
    """
    assert logits.is_contiguous()
    assert bitmask.is_contiguous()
    size, (num_rows, num_words) = logits.shape[1], bitmask.shape
    assert num_words == ceil_div(size, 32), f"{num_words} words for {size} tokens"
    if num_rows:
        grid = (ceil_div(size, _BLOCK), num_rows)
        _apply_token_bitmask[grid](logits, bitmask, rows, size, num_words, BLOCK=_BLOCK, **FUSED)
