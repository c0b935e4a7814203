"""Exact operations along the rows of a [S, V] tensor that torch does slowly on a CPU, and their slices.

Everything here gives a row the same bits whatever other rows stand beside it: selections and comparisons are
exact, and sums run over blocks of one row. This is the one place where a CPU and a GPU take different calls.
Legend: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

# Elements of a slice that a chain of elementwise operations works through: 1 MB of float32 stays in a core's
# L2; a GPU wants few large launches and only needs its temporaries bounded.
_SLICE_ELEMENTS_CPU = 1 << 18
_SLICE_ELEMENTS_GPU = 1 << 26
BLOCK_SIZE = 128
_LOW_32_BITS = 0xFFFFFFFF


def row_slices(num_rows: int, row_size: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices of rows, each of at least one row."""
    limit = _SLICE_ELEMENTS_CPU if device.type == "cpu" else _SLICE_ELEMENTS_GPU
    step = max(1, limit // row_size)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def argmax_rows(values: Tensor) -> Tensor:
    """int64 [S]: the lowest index of each row's maximum, or of its first NaN."""
    if values.device.type == "cpu":  # 32 x 151,936: 0.7 ms, torch.argmax 9.3 ms (2-core Xeon, 1 thread)
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def largest_values(values: Tensor, count: int) -> Tensor:
    """[S, count] the largest of each row of a float32 tensor in falling order, duplicates kept."""
    if not _is_few(count, values.shape[1]):
        return _select(values, count)
    whole, tail = _split_blocks(values)
    blocks = whole.amax(dim=-1).topk(count, dim=-1).indices
    rows = torch.arange(len(values), device=values.device)[:, None]
    return _select(torch.cat((whole[rows, blocks].flatten(1), tail), dim=1), count)


def largest_ids(values: Tensor, count: int) -> Tensor:
    """int64 [S, count] ids of the largest of each row in falling order, equal ones by id."""
    num_rows, size = values.shape
    ids = torch.arange(size, device=values.device)
    if not _is_few(count, size):
        return _largest_ids(values, ids.expand(num_rows, -1), count)
    whole, tail = _split_blocks(values)
    blocks = largest_ids(whole.amax(dim=-1), count)  # [S, count], of equal maxima the first
    members = (blocks[:, :, None] * BLOCK_SIZE + ids[:BLOCK_SIZE]).flatten(1)
    members = torch.cat((members, ids[size - tail.shape[1] :].expand(num_rows, -1)), dim=1)
    return _largest_ids(values.gather(1, members), members, count)


def _split_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Views of [S, V]: whole blocks [S, B, 128] and the rest [S, V % 128]."""
    num_whole = values.shape[1] // BLOCK_SIZE
    whole, tail = values.split((num_whole * BLOCK_SIZE, values.shape[1] % BLOCK_SIZE), dim=1)
    return whole.unflatten(1, (num_whole, BLOCK_SIZE)), tail


def _is_few(count: int, size: int) -> bool:
    """Whether to look in blocks first: the `count` blocks with the largest maxima hold the largest values."""
    return 2 * (count + 1) * BLOCK_SIZE < size


def _select(values: Tensor, count: int) -> Tensor:
    """The `count` largest of each row in falling order."""
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values
    array = values.numpy()
    if count < array.shape[-1]:  # vectorized in numpy: 0.12 ms at V=151,936, torch.topk 0.3 ms
        array = np.partition(array, array.shape[-1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def _largest_ids(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """The `ids` [S, N] of the largest `values` [S, N] float32, equal ones in the order of ids.

    A key holds a value's bits, made to order like integers, above the complement of its id: one selection of
    int64 numbers then gives an exact order on every device.
    """
    bits = (values + 0.0).view(torch.int32)  # the sum makes -0.0 a 0.0, its equal
    ordered = bits ^ ((bits >> 31) & np.iinfo(np.int32).max)
    keys = ordered.to(torch.int64).bitwise_left_shift_(32).add_(_LOW_32_BITS - ids)
    return _LOW_32_BITS - (_select(keys, count) & _LOW_32_BITS)


def block_sums(values: Tensor) -> Tensor:
    """float64 [S, ceil(V / 128)] sums of consecutive blocks of each row of a float32 tensor."""
    whole, tail = _split_blocks(values)
    sums = whole.sum(dim=-1)
    if tail.shape[1]:
        padded = torch.nn.functional.pad(tail, (0, BLOCK_SIZE - tail.shape[1]))
        sums = torch.cat((sums, padded[:, None].sum(dim=-1)), dim=1)
    return sums.double()


def find_quantile_blocks(sums: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row's cumulative sum first exceeds fraction * total: (block int64 [S], rest float64 [S]).

    `sums` are `block_sums` of weights that are not negative, `fractions` [S] float64 in [0, 1). The rest is
    what the block's own weights must exceed.
    """
    cumulative = sums.cumsum(dim=1)
    targets = fractions[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, targets, right=True).clamp_(max=sums.shape[1] - 1)
    rest = targets - (cumulative.gather(1, block) - sums.gather(1, block))
    return block[:, 0], rest[:, 0]


def block_members(blocks: Tensor, row_size: int) -> tuple[Tensor, Tensor]:
    """Indexes [S, 128] into a row of what `blocks` [S] hold, and which of them the row has."""
    index = blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=blocks.device)
    return index.clamp(max=row_size - 1), index < row_size


def find_in_block(weights: Tensor, rest: Tensor) -> Tensor:
    """int64 [S]: first place in a block's `weights` [S, 128] where their cumulative sum exceeds `rest`.

    Never a place of weight 0 if there is a positive one, also where rounding leaves the sum short of `rest`.
    """
    running = weights.double().cumsum(dim=1)
    first_above = torch.searchsorted(running, rest[:, None], right=True)
    last_positive = torch.searchsorted(running, running[:, -1:].contiguous())
    return torch.minimum(first_above, last_positive)[:, 0].clamp_(max=BLOCK_SIZE - 1)


def keep_at_least(weights: Tensor, thresholds: Tensor) -> None:
    """Set what is below its row's threshold ([S] float32) to 0, in place."""
    # A comparison into a float tensor and a product: 0.03 ms at V=151,936, masked_fill 0.56 ms on a CPU.
    weights.mul_(torch.ge(weights, thresholds[:, None], out=torch.empty_like(weights)))
