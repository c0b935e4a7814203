"""One token a row on a GPU, as worker/sampling/sampler.py has it: the noise's quantile of what filters leave.

Weights are w = exp((x - max) scale), 1 at the top. Sums run over blocks of 128 in float32 and over blocks in
float64; a row's numbers depend on the row alone. `_summarize` reads the logits once, all rows at once, and
leaves maxima and sums. `_choose` takes the token of greedy rows and of rows without filters from these and
one chunk. `_choose_filtered` bisects the bits of a weight for the threshold of top-k and top-p. It looks only
into the blocks with the largest maxima: they hold every weight above the smallest of those maxima. Where
that is not enough for top-p it takes the whole row.
Logits are float32, or of 16 bits, of which the token is that of the same numbers in float32.
Bytes: S V logits once; filtered rows again what they look into. Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import typing

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.dependent_launch_triton import launch_options, wait_for_inputs
from ..triton.launch_sizes import ceil_div, next_power_of_2

_jit: typing.Any = triton.jit

NUM_PARAMETERS = 5  # columns of `parameters`: scale (0: greedy), top_k, top_p, min_p, noise
_BLOCK = tl.constexpr(128)
_CHUNK_BLOCKS = tl.constexpr(32)  # blocks of a program of `_summarize`
_STEP_BLOCKS = tl.constexpr(32)  # blocks that a filtered row looks at together
# Blocks to look into for top-p before the whole row: enough for any model that is sure of itself.
_TOP_P_BLOCKS = 256
_MAX_REGISTERS = 255  # of a thread: unsaid, ptxas spills to have more programs at once than rows
_ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0


@_jit
def _weigh(logits: typing.Any, top: typing.Any, scale: typing.Any) -> typing.Any:
    return tl.exp((logits - top) * scale)


@_jit
def _find(sums: typing.Any, target: typing.Any, places: typing.Any) -> typing.Any:
    """(first place where the running sum exceeds `target`, what was summed before it).

    `sums` [n] are float64 and not negative. Never a place of sum 0 if another has more.
    """
    running = tl.cumsum(sums, axis=0)
    last = tl.max(tl.where(sums > 0, places, 0), axis=0)
    place = tl.minimum(tl.sum((running <= target).to(tl.int32), axis=0), last)
    return place, tl.sum(tl.where(places < place, sums, 0.0), axis=0)


@_jit
def _find_in_block(
    row: typing.Any,
    start: typing.Any,
    size: int,
    top: typing.Any,
    scale: typing.Any,
    least: typing.Any,
    target: typing.Any,
) -> typing.Any:
    """The token of the block at `start` where the sum of weights from `least` on exceeds `target`."""
    places = tl.arange(0, _BLOCK)
    logits = tl.load(row + start + places, mask=start + places < size, other=-float("inf")).to(tl.float32)
    weights = _weigh(logits, top, scale)
    place, _ = _find(tl.where(weights >= least, weights, 0.0).to(tl.float64), target, places)
    return start + place


@_jit
def _summarize(
    logits: typing.Any,
    parameters: typing.Any,
    block_tops: typing.Any,
    chunk_tops: typing.Any,
    chunk_ids: typing.Any,
    chunk_sums: typing.Any,
    size: int,
    num_blocks: int,
    num_chunks: int,
    NUM_PARAMETERS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Of each chunk: maxima of its blocks, its maximum (NaN if there is one) with its lowest id, its sum."""
    wait_for_inputs(USE_PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = chunk * _CHUNK_BLOCKS + tl.arange(0, _CHUNK_BLOCKS)
    ids = blocks[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    values = tl.load(logits + row * size + ids, mask=ids < size, other=-float("inf")).to(tl.float32)
    tops = tl.max(values, axis=1)
    tl.store(block_tops + row * num_blocks + blocks, tops, mask=blocks < num_blocks)
    has_nan = tl.max(tl.max((values != values).to(tl.int32), axis=1), axis=0) == 1
    top = tl.max(tops, axis=0)
    first = tl.min(tl.min(tl.where(values == top, ids, 0x7FFFFFFF), axis=1), axis=0)
    scale = tl.load(parameters + row * NUM_PARAMETERS).to(tl.float32)
    scale = tl.where(scale > 0, scale, 1.0)  # not read of greedy rows; 0 times infinity is NaN
    weights = _weigh(values, tl.where(top == -float("inf"), 0.0, top), scale)
    place = row * num_chunks + chunk
    tl.store(chunk_tops + place, tl.where(has_nan, float("nan"), top))
    tl.store(chunk_ids + place, first)
    tl.store(chunk_sums + place, tl.sum(tl.sum(weights, axis=1).to(tl.float64), axis=0))


@_jit
def _choose(
    logits: typing.Any,
    parameters: typing.Any,
    chunk_tops: typing.Any,
    chunk_ids: typing.Any,
    chunk_sums: typing.Any,
    token_ids: typing.Any,
    row_tops: typing.Any,
    row_sums: typing.Any,
    size: int,
    num_chunks: int,
    NUM_PARAMETERS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The most likely token, or the noise's quantile of all tokens; the row's maximum and sum of weights."""
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED_CHUNKS)
    is_there = chunks < num_chunks
    tops = tl.load(chunk_tops + row * num_chunks + chunks, mask=is_there, other=-float("inf"))
    ids = tl.load(chunk_ids + row * num_chunks + chunks, mask=is_there, other=0x7FFFFFFF)
    has_nan = tl.max((tops != tops).to(tl.int32), axis=0) == 1
    top = tl.where(has_nan, float("nan"), tl.max(tops, axis=0))
    token = tl.minimum(tl.min(tl.where(tops == top, ids, 0x7FFFFFFF), axis=0), size - 1)
    scale = tl.load(parameters + row * NUM_PARAMETERS).to(tl.float32)
    if (scale > 0) & (tl.abs(top) < float("inf")):
        noise = tl.load(parameters + row * NUM_PARAMETERS + 4)
        sums = tl.load(chunk_sums + row * num_chunks + chunks, mask=is_there, other=0.0)
        sums = sums * _weigh(tops, top, scale).to(tl.float64)
        total = tl.sum(sums, axis=0)
        tl.store(row_sums + row, total)
        target = noise * total
        chunk, before = _find(sums, target, chunks)
        target -= before
        places = tl.arange(0, _CHUNK_BLOCKS)
        members = (chunk * _CHUNK_BLOCKS + places)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        values = tl.load(logits + row * size + members, mask=members < size, other=-float("inf")).to(
            tl.float32
        )
        place, before = _find(tl.sum(_weigh(values, top, scale), axis=1).to(tl.float64), target, places)
        start = (chunk * _CHUNK_BLOCKS + place) * _BLOCK
        token = _find_in_block(logits + row * size, start, size, top, scale, 0.0, target - before)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(row_tops + row, top)


@_jit
def _load_weights(
    values: typing.Any,
    size: int,
    blocks: typing.Any,
    first: typing.Any,
    num_blocks: typing.Any,
    top: typing.Any,
    scale: typing.Any,
) -> typing.Any:
    """Weights [step, 128] of the listed blocks from the place `first` on, -1 where there is nothing."""
    places = first + tl.arange(0, _STEP_BLOCKS)
    starts = tl.load(blocks + places, mask=places < num_blocks, other=size) * _BLOCK
    ids = starts[:, None] + tl.arange(0, _BLOCK)[None, :]
    is_there = (ids < size) & (places < num_blocks)[:, None]
    weights = _weigh(tl.load(values + ids, mask=is_there, other=-float("inf")).to(tl.float32), top, scale)
    return tl.where(is_there, weights, -1.0)


@_jit
def _measure(
    values: typing.Any,
    size: int,
    blocks: typing.Any,
    num_blocks: typing.Any,
    top: typing.Any,
    scale: typing.Any,
    least: typing.Any,
) -> typing.Any:
    """(number, sum in float64) of the weights from `least` on in the listed blocks."""
    counts = tl.zeros((_STEP_BLOCKS,), dtype=tl.int32)
    sums = tl.zeros((_STEP_BLOCKS,), dtype=tl.float64)
    for first in range(0, num_blocks, _STEP_BLOCKS):
        weights = _load_weights(values, size, blocks, first, num_blocks, top, scale)
        is_kept = weights >= least
        counts += tl.sum(is_kept.to(tl.int32), axis=1)
        sums += tl.sum(tl.where(is_kept, weights, 0.0), axis=1).to(tl.float64)
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@_jit
def _bisect(
    values: typing.Any,
    size: typing.Any,
    blocks: typing.Any,
    num_blocks: typing.Any,
    top: typing.Any,
    scale: typing.Any,
    least: typing.Any,
    count: typing.Any,
    total: typing.Any,
    min_count: typing.Any,
    min_total: typing.Any,
) -> typing.Any:
    """(threshold, what it keeps in sum): the largest that keeps so many weights of the listed and so much.

    `least` keeps `count` and `total`, which is enough. Positive floats are in the order of their bits; the
    search ends when at most one weight is left between the bounds.
    """
    low = least.to(tl.int32, bitcast=True)
    high = low * 0 + _ONE_BITS + 1
    count_above = count * 0
    while (high - low > 1) & (count - count_above > 1):
        middle = low + (high - low) // 2
        threshold = middle.to(tl.float32, bitcast=True)
        kept, kept_total = _measure(values, size, blocks, num_blocks, top, scale, threshold)
        is_enough = (kept >= min_count) & (kept_total >= min_total)
        low = tl.where(is_enough, middle, low)
        count = tl.where(is_enough, kept, count)
        total = tl.where(is_enough, kept_total, total)
        high = tl.where(is_enough, high, middle)
        count_above = tl.where(is_enough, count_above, kept)
    return low.to(tl.float32, bitcast=True), total


@_jit
def _list_all(blocks: typing.Any, num_blocks: typing.Any, PADDED_BLOCKS: tl.constexpr):
    places = tl.arange(0, PADDED_BLOCKS)
    tl.debug_barrier()  # everyone has read what stood here
    tl.store(blocks + places, places, mask=places < num_blocks)
    tl.debug_barrier()


@_jit
def _list_from(
    blocks: typing.Any,
    tops: typing.Any,
    num_blocks: typing.Any,
    top: typing.Any,
    scale: typing.Any,
    pivot: typing.Any,
    PADDED_BLOCKS: tl.constexpr,
) -> typing.Any:
    """List the blocks whose maximum weighs `pivot` or more, in order; how many they are."""
    places = tl.arange(0, PADDED_BLOCKS)
    is_there = places < num_blocks
    weights = _weigh(tl.load(tops + places, mask=is_there, other=-float("inf")).to(tl.float32), top, scale)
    is_listed = is_there & (weights >= pivot)
    targets = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.debug_barrier()
    tl.store(blocks + targets, places, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), axis=0)


@_jit
def _draw(
    values: typing.Any,
    size: int,
    blocks: typing.Any,
    num_blocks: typing.Any,
    top: typing.Any,
    scale: typing.Any,
    least: typing.Any,
    target: typing.Any,
) -> typing.Any:
    """The token at which the sum of the listed weights from `least` on exceeds `target`."""
    base = target * 0.0
    before = base
    place = num_blocks * 0
    last = place
    for first in range(0, num_blocks, _STEP_BLOCKS):
        weights = _load_weights(values, size, blocks, first, num_blocks, top, scale)
        sums = tl.sum(tl.where(weights >= least, weights, 0.0), axis=1).to(tl.float64)
        running = base + tl.cumsum(sums, axis=0)
        base = tl.max(running, axis=0)
        places = first + tl.arange(0, _STEP_BLOCKS)
        is_passed = (running <= target) & (places < num_blocks)
        place += tl.sum(is_passed.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(is_passed, running, 0.0), axis=0))
        last = tl.maximum(last, tl.max(tl.where(sums > 0, places, 0), axis=0))
    start = tl.load(blocks + tl.minimum(place, last)) * _BLOCK
    return _find_in_block(values, start, size, top, scale, least, target - before)


@_jit
def _choose_filtered(
    logits: typing.Any,
    parameters: typing.Any,
    block_tops: typing.Any,
    row_tops: typing.Any,
    row_sums: typing.Any,
    blocks: typing.Any,
    token_ids: typing.Any,
    size: int,
    num_blocks: int,
    NUM_PARAMETERS: tl.constexpr,
    TOP_P_BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Overwrite the token of a random row that has filters: min-p, then top-k, then top-p of what is left.

    Three searches share one piece of code. The first is for the blocks to look into, in the tops of blocks
    as if they were a row; the others are for the thresholds of top-k and top-p in these blocks.
    """
    wait_for_inputs(USE_PDL)
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(row_tops + row)
    parameters += row * NUM_PARAMETERS
    scale = tl.load(parameters).to(tl.float32)
    top_k = tl.minimum(tl.load(parameters + 1), size).to(tl.int32)
    top_p = tl.load(parameters + 2)
    least = tl.load(parameters + 3).to(tl.float32)
    has_top_k, has_top_p = top_k < size, top_p < 1.0
    if (scale > 0) & (tl.abs(top) < float("inf")) & (has_top_k | has_top_p | (least > 0)):
        logits += row * size
        block_tops += row * num_blocks
        blocks += row * num_blocks
        wanted = tl.maximum(tl.where(has_top_k, top_k, 0), tl.where(has_top_p, TOP_P_BLOCKS, 0))
        # top-p is a fraction of what top-k and min-p keep. Without either that is the whole row, whose sum
        # `_summarize` has left; of what min-p alone keeps of the row, the sum is not known yet.
        is_sum_known = (least == 0) & ~has_top_k
        can_cut = (has_top_k | is_sum_known) & (wanted > 0)
        _list_all(blocks, num_blocks, PADDED_BLOCKS)
        num_listed = tl.cdiv(num_blocks, _BLOCK)
        total = tl.load(row_sums + row)
        for search in range(3):
            values = tl.where(search == 0, block_tops, logits)
            num_values = tl.where(search == 0, num_blocks, size)
            min_count = tl.where(search == 0, wanted, tl.where(search == 1, top_k, 1))
            is_on = tl.where(search == 0, can_cut, tl.where(search == 1, has_top_k, has_top_p))
            count, listed = _measure(values, num_values, blocks, num_listed, top, scale, least)
            min_total = listed * 0.0
            if search == 2:
                min_total = top_p * tl.where(is_sum_known, total, listed)
                if listed < min_total:
                    _list_all(blocks, num_blocks, PADDED_BLOCKS)
                    num_listed, least = num_blocks, least * 0.0
                    count, listed = size, total
            total_kept = listed
            if is_on & (count > min_count):
                least, total_kept = _bisect(
                    values,
                    num_values,
                    blocks,
                    num_listed,
                    top,
                    scale,
                    least,
                    count,
                    listed,
                    min_count,
                    min_total,
                )
            if search == 0:
                num_listed = _list_from(blocks, block_tops, num_blocks, top, scale, least, PADDED_BLOCKS)
            elif search == 2:
                target = tl.load(parameters + 4) * total_kept
                token = _draw(logits, size, blocks, num_listed, top, scale, least, target)
                tl.store(token_ids + row, tl.minimum(token, size - 1).to(tl.int64))


def launch_sample(logits: Tensor, parameters: Tensor, has_filters: bool) -> tuple[Tensor, Tensor]:
    """(token ids int64 [S], maxima float32 [S]) for contiguous `logits` [S, V] of float32 or 16 bits.

    `parameters` is float64 [S, NUM_PARAMETERS]: 1 / temperature (0: greedy), top_k (V: off), top_p (1: off),
    min_p (0: off), noise in [0, 1). Without `has_filters` no row may have a filter. The token of a row
    whose maximum is not finite has no meaning.
    """
    assert logits.is_contiguous()
    assert parameters.is_contiguous()
    num_rows, size = logits.shape
    block_size, chunk_blocks = _BLOCK.value, _CHUNK_BLOCKS.value
    num_blocks = ceil_div(size, block_size)
    num_chunks = ceil_div(num_blocks, chunk_blocks)
    block_tops = logits.new_empty((num_rows, num_blocks))  # of the logits' type, for both are searched
    chunk_tops = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    chunk_ids = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    chunk_sums = logits.new_empty((num_rows, num_chunks), dtype=torch.float64)
    token_ids = logits.new_empty(num_rows, dtype=torch.int64)
    row_tops = logits.new_empty(num_rows, dtype=torch.float32)
    row_sums = logits.new_empty(num_rows, dtype=torch.float64)
    pdl = launch_options(logits.device)
    _summarize[(num_chunks, num_rows)](
        logits,
        parameters,
        block_tops,
        chunk_tops,
        chunk_ids,
        chunk_sums,
        size,
        num_blocks,
        num_chunks,
        NUM_PARAMETERS=NUM_PARAMETERS,
        **pdl,
    )
    _choose[(num_rows,)](
        logits,
        parameters,
        chunk_tops,
        chunk_ids,
        chunk_sums,
        token_ids,
        row_tops,
        row_sums,
        size,
        num_chunks,
        NUM_PARAMETERS=NUM_PARAMETERS,
        PADDED_CHUNKS=next_power_of_2(num_chunks),
        **pdl,
    )
    if has_filters:
        blocks = logits.new_empty((num_rows, num_blocks), dtype=torch.int32)
        _choose_filtered[(num_rows,)](
            logits,
            parameters,
            block_tops,
            row_tops,
            row_sums,
            blocks,
            token_ids,
            size,
            num_blocks,
            NUM_PARAMETERS=NUM_PARAMETERS,
            TOP_P_BLOCKS=_TOP_P_BLOCKS,
            PADDED_BLOCKS=next_power_of_2(num_blocks),
            num_warps=8,
            maxnreg=_MAX_REGISTERS,
            **pdl,
        )
    return token_ids, row_tops
