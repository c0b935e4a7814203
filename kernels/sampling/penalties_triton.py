"""penalties on a GPU in one launch; formula and bytes in penalties.py."""

from __future__ import annotations

import typing

import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import FUSED
from ..triton.launch_sizes import ceil_div

_jit: typing.Any = triton.jit

_BLOCK = 512


@_jit(do_not_specialize=["num_places"])
def _penalize(
    logits: typing.Any,
    places: typing.Any,
    counts: typing.Any,
    penalties: typing.Any,
    num_places: int,
    BLOCK: tl.constexpr,
):
    """One program BLOCK places."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = index < num_places
    place = tl.load(places + index, mask=is_there, other=0)
    count = tl.load(counts + index, mask=is_there, other=0.0)
    repetition = tl.load(penalties + index, mask=is_there, other=1.0)
    frequency = tl.load(penalties + num_places + index, mask=is_there, other=0.0)
    presence = tl.load(penalties + 2 * num_places + index, mask=is_there, other=0.0)
    seen = tl.load(logits + place, mask=is_there, other=0.0)
    seen = tl.where(seen > 0, tl.div_rn(seen, repetition), seen * repetition)
    seen = seen - frequency * count - tl.where(count > 0, presence, 0.0)
    tl.store(logits + place, seen, mask=is_there)


def launch_penalties(logits: Tensor, places: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """As the reference; all contiguous."""
    assert logits.is_contiguous()
    assert penalties.is_contiguous()
    num_places = places.shape[0]
    if num_places:
        _penalize[(ceil_div(num_places, _BLOCK),)](
            logits, places, counts, penalties, num_places, BLOCK=_BLOCK, **FUSED
        )
