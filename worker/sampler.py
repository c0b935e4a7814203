"""The sampler: from logits to one token a row. A token is a function of (logits, parameters, seed, position).

Filters (top-k, top-p, min-p) are thresholds on a token's weight: nothing is sorted by token, equal weights
at the edge stay together, as in vLLM. The token is the noise's quantile of what is left, in the order of ids.
Every reduction runs along one row in a fixed order: neighbours in the batch do not change a row's bits.
Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .logit_edits import EditedRow, apply_logit_edits
from .logprobs import LogprobsTensors, compute_logprobs
from .noise import uniform_noise
from .request_rows import RequestRows
from .row_ops import argmax_rows, block_sums, find_quantiles, keep_at_least, largest_values, row_slices
from .staging import to_device

Int64s = NDArray[np.int64]

# The largest weights that top-p looks at before it sorts all: enough for any model that is sure of itself.
_TOP_P_PREFIX = 1024


@dataclass(slots=True)
class SamplingBatch:
    """How each of the S rows is sampled: columns on the host, and objects for the few that need them."""

    temperature: NDArray[np.float32]
    top_k: Int64s  # V if off
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    output_positions: Int64s
    edited: list[EditedRow] = field(default_factory=list[EditedRow])
    logprob_groups: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # alternatives -> rows


@dataclass(slots=True)
class SampledTokens:
    """Tensors on the device, of the S rows."""

    token_ids: Tensor  # int64 [S]
    is_bad: Tensor  # bool [S]: NaN or infinite logits, or nothing left to sample; the token is meaningless
    logprobs: list[tuple[list[int], LogprobsTensors]]  # (rows among the S, their raw logprobs)


def make_sampling_batch(rows: RequestRows, row_ids: Int64s) -> SamplingBatch:
    """Gather the parameters of `row_ids`. History must be complete for rows that need it."""
    num_output = rows.num_known[row_ids] - rows.num_prompt[row_ids]
    batch = SamplingBatch(
        temperature=rows.temperature[row_ids],
        top_k=rows.top_k[row_ids],
        top_p=rows.top_p[row_ids],
        min_p=rows.min_p[row_ids],
        seeds=rows.seed[row_ids],
        output_positions=num_output,
    )
    for index in np.flatnonzero(rows.has_edits[row_ids]).tolist():
        row = int(row_ids[index])
        edits = rows.edits[row]
        assert edits is not None
        batch.edited.append(EditedRow(index, edits, rows.history(row), int(num_output[index])))
    for index in np.flatnonzero(rows.has_logprobs[row_ids]).tolist():
        num_logprobs = rows.num_logprobs[int(row_ids[index])]
        assert num_logprobs is not None
        batch.logprob_groups.setdefault(num_logprobs, []).append(index)
    return batch


def sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample every row of float32 `logits` [S, V], which are edited in place."""
    raw = [
        (alternatives, indexes, logits[_index(indexes, logits.device)])
        for alternatives, indexes in batch.logprob_groups.items()
    ]
    if batch.edited:
        apply_logit_edits(logits, batch.edited)
    token_ids = argmax_rows(logits)
    top = logits.gather(1, token_ids[:, None])  # [S, 1]
    is_random = batch.temperature > 0
    if is_random.any():
        _sample_random(logits, top, batch, is_random, token_ids)
    logprobs = [
        (indexes, compute_logprobs(rows, token_ids[_index(indexes, logits.device)], alternatives))
        for alternatives, indexes, rows in raw
    ]
    return SampledTokens(token_ids, ~torch.isfinite(top[:, 0]), logprobs)


def _index(indexes: list[int], device: torch.device) -> Tensor:
    return to_device(np.array(indexes, dtype=np.int64), device)


def _sample_random(
    logits: Tensor, top: Tensor, batch: SamplingBatch, is_random: NDArray[np.bool_], token_ids: Tensor
) -> None:
    """Overwrite `token_ids` where `is_random`; rows with filters go apart from those without."""
    vocab_size, device = logits.shape[1], logits.device
    is_filtered = (batch.top_k < vocab_size) | (batch.top_p < 1.0) | (batch.min_p > 0.0)
    noise = uniform_noise(batch.seeds, batch.output_positions)
    for has_filters in (False, True):
        group = np.flatnonzero(is_random & (is_filtered == has_filters))
        for part in row_slices(len(group), vocab_size, device):
            rows = group[part]
            index = to_device(rows, device)
            temperature = to_device(batch.temperature[rows], device)
            # Weights are probabilities times a constant of the row: the most likely token has weight 1.
            weights = logits[index].sub_(top[index]).div_(temperature[:, None]).exp_()
            if has_filters:
                _filter(weights, batch, rows)
            token_ids[index] = find_quantiles(weights, to_device(noise[rows], device))


def _filter(weights: Tensor, batch: SamplingBatch, rows: Int64s) -> None:
    """Set the weights [R, V] that min-p, top-k and top-p of `rows` exclude to 0."""
    device = weights.device
    thresholds = to_device(batch.min_p[rows], device)
    top_k = batch.top_k[rows]
    has_top_k = top_k < weights.shape[1]
    if has_top_k.any():
        places = np.where(has_top_k, top_k, 1) - 1
        largest = largest_values(weights, int(places.max()) + 1)
        kth = largest.gather(1, to_device(places, device)[:, None])[:, 0]
        thresholds = torch.maximum(thresholds, kth * to_device(has_top_k, device))
    keep_at_least(weights, thresholds)
    has_top_p = np.flatnonzero(batch.top_p[rows] < 1.0)
    if len(has_top_p):
        index = to_device(has_top_p, device)
        thresholds = weights.new_zeros(len(rows))
        top_p = to_device(batch.top_p[rows][has_top_p], device)
        thresholds[index] = _top_p_thresholds(weights[index], top_p)
        keep_at_least(weights, thresholds)


def _top_p_thresholds(weights: Tensor, top_p: Tensor) -> Tensor:
    """[R] smallest weight that top-p keeps: with the larger ones it makes up `top_p` of the row's total."""
    num_rows, size = weights.shape
    targets = top_p * block_sums(weights).cumsum(dim=1)[:, -1]
    thresholds = weights.new_zeros(num_rows)
    waiting = torch.arange(num_rows, device=weights.device)
    for count in _prefix_sizes(size, weights.device):
        largest = largest_values(weights[waiting], count)
        is_short = largest.double().cumsum(dim=1) < targets[waiting, None]
        is_found = ~is_short[:, -1]
        place = is_short.sum(dim=1, keepdim=True).clamp_(max=count - 1)
        # Where rounding keeps even the whole row short of its target, nothing is cut off.
        thresholds[waiting] = largest.gather(1, place)[:, 0] * is_found
        waiting = waiting[~is_found] if count < size else waiting
        if waiting.numel() == 0:
            break
    return thresholds


def _prefix_sizes(size: int, device: torch.device) -> tuple[int, ...]:
    # A GPU sorts a row faster than it can tell the host whether a prefix was enough.
    if device.type != "cpu" or size <= 4 * _TOP_P_PREFIX:
        return (size,)
    return (_TOP_P_PREFIX, size)
