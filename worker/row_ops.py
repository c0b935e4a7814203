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
_SUM_BLOCK = 128


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
    """[S, count] the largest values of each row in falling order, duplicates kept."""
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values
    array = values.numpy()
    if count < array.shape[-1]:  # numpy's vectorized selection: 0.12 ms at V=151,936, torch.topk 0.3 ms
        array = np.partition(array, array.shape[-1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.ascontiguousarray(np.sort(array, axis=-1)[:, ::-1]))


def block_sums(values: Tensor) -> Tensor:
    """float64 [S, ceil(V / 128)] sums of consecutive blocks of each row of a float32 tensor."""
    num_rows, size = values.shape
    num_whole = size // _SUM_BLOCK
    whole = values[:, : num_whole * _SUM_BLOCK].view(num_rows, num_whole, _SUM_BLOCK)
    sums = whole.sum(dim=-1) if num_whole else values.new_empty(num_rows, 0)
    if size % _SUM_BLOCK:
        tail = values.new_zeros(num_rows, 1, _SUM_BLOCK)
        tail[:, 0, : size % _SUM_BLOCK] = values[:, num_whole * _SUM_BLOCK :]
        sums = torch.cat((sums, tail.sum(dim=-1)), dim=1)
    return sums.double()


def find_quantiles(weights: Tensor, fractions: Tensor) -> Tensor:
    """int64 [S]: per row the first index whose inclusive cumulative weight exceeds fraction * total.

    `weights` [S, V] are float32 and not negative, `fractions` [S] float64 in [0, 1). An index of weight 0 is
    never returned if the row has a positive one, also where rounding leaves the sum short of the target.
    Two levels, blocks and then one block: a row is read once and summed in float64 without a float64 copy.
    """
    cumulative = block_sums(weights).cumsum(dim=1)
    targets = fractions[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, targets, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = cumulative.gather(1, (block - 1).clamp_(min=0)) * (block > 0)
    index = block * _SUM_BLOCK + torch.arange(_SUM_BLOCK, device=weights.device)  # [S, 128]
    inside = weights.gather(1, index.clamp(max=weights.shape[1] - 1)).double() * (index < weights.shape[1])
    running = inside.cumsum(dim=1)
    first_above = (running <= targets - before).sum(dim=1)
    last_positive = (running < running[:, -1:]).sum(dim=1)
    found = block[:, 0] * _SUM_BLOCK + torch.minimum(first_above, last_positive)
    return found.clamp_(max=weights.shape[1] - 1)  # rows of NaN


def keep_at_least(weights: Tensor, thresholds: Tensor) -> None:
    """Set what is below its row's threshold ([S] float32) to 0, in place."""
    # A comparison into a float tensor and a product: 0.03 ms at V=151,936, masked_fill 0.56 ms on a CPU.
    weights.mul_(torch.ge(weights, thresholds[:, None], out=torch.empty_like(weights)))
