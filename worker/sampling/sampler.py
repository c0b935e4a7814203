"""The sampler: from logits to one token a row. A token is a function of (logits, parameters, seed, position).

Filters (top-k, top-p, min-p) are thresholds on a token's weight: nothing is sorted by token, equal weights
at the edge stay together, as in vLLM. The token is the noise's quantile of what is left, in the order of ids.
Every reduction runs along one row in a fixed order: neighbours in the batch do not change a row's bits.
Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.params.sampling_params import SamplingParams
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.sample import launch_sample
from ..steps.row_ops import (
    argmax_rows,
    block_members,
    block_sums,
    find_in_block,
    find_quantile_blocks,
    keep_at_least,
    largest_values,
    row_slices,
)
from ..steps.staging import to_device
from .grammar import Masks
from .logit_edit import EditedRow
from .logit_edits import ALL_BUT_GRAMMAR, apply_logit_edits, compute_masks
from .logprobs import LogprobsTensors, compute_logprobs
from .noise import uniform_noise

Int64s = NDArray[np.int64]

_SEED_MASK = 2**64 - 1
# The largest weights that top-p looks at before it sorts all: enough for any model that is sure of itself.
_TOP_P_PREFIX = 256


@dataclass(slots=True)
class SamplingColumns:
    """What is computed with of each row's SamplingParams: a column a field, of N rows or of S that sample."""

    temperature: NDArray[np.float32]
    top_k: Int64s  # V if off
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]

    def enter(self, row: int, params: SamplingParams, vocab_size: int) -> None:
        """Set a row's columns."""
        self.temperature[row] = params.temperature
        self.top_k[row] = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        # Frontends set every seed; a request without one still has to be the same when it is repeated.
        self.seeds[row] = (params.seed or 0) & _SEED_MASK

    def take(self, rows: Int64s) -> dict[str, Any]:
        """The columns of `rows` by name, copied."""
        return {name: getattr(self, name)[rows] for name in SamplingColumns.__slots__}


def make_sampling_columns(num_rows: int) -> SamplingColumns:
    """Columns to be filled in."""
    return SamplingColumns(
        temperature=np.zeros(num_rows, dtype=np.float32),
        top_k=np.zeros(num_rows, dtype=np.int64),
        top_p=np.zeros(num_rows, dtype=np.float64),
        min_p=np.zeros(num_rows, dtype=np.float32),
        seeds=np.zeros(num_rows, dtype=np.uint64),
    )


@dataclass(slots=True)
class LogprobGroup:
    """Rows that ask for logprobs of as many tokens: of the likeliest ones, or of their own `token_ids`."""

    num_others: int
    rows: list[int] = field(default_factory=list[int])
    token_ids: list[Int64s] = field(default_factory=list[Int64s])  # of each of `rows`, or empty


@dataclass(slots=True)
class SamplingBatch(SamplingColumns):
    """How each of the S rows is sampled: columns on the host, and objects for the few that need them."""

    output_positions: Int64s
    edited: list[EditedRow] = field(default_factory=list[EditedRow])
    logprob_groups: list[LogprobGroup] = field(default_factory=list[LogprobGroup])
    masks: Masks | None = None  # of `edited`, if they have been computed
    noise: NDArray[np.float64] | None = None  # likewise

    def prepare(self) -> None:
        """Compute what does not depend on logits; `sample` does it otherwise."""
        self.masks = compute_masks(self.edited, len(self.seeds))
        self.noise = uniform_noise(self.seeds, self.output_positions)


@dataclass(slots=True)
class SampledTokens:
    """Tensors on the device, of the S rows."""

    token_ids: Tensor  # int64 [S]
    is_bad: Tensor  # bool [S]: NaN or infinite logits, or nothing left to sample; the token is meaningless
    logprobs: list[tuple[list[int], LogprobsTensors]]  # (rows among the S, their raw logprobs)
    failures: list[EditedRow] = field(default_factory=list[EditedRow])
    work_us: dict[int, int] = field(default_factory=dict[int, int])  # processor time of rows' own work


def sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Sample every row of `logits` [S, V], which may be edited in place.

    They are float32, or of a type that the chosen kernel reads: the same tokens come of both.
    """
    if batch.edited or batch.logprob_groups:
        logits = logits.float()
    raw = [(group, *_take_raw(logits, group, batch)) for group in batch.logprob_groups]
    masks = _edit(logits, batch) if batch.edited else None
    token_ids, top = _choose_tokens(logits, batch, masks)
    work_us = {row.index: row.work_us for row in batch.edited}
    logprobs: list[tuple[list[int], LogprobsTensors]] = []
    for group, raw_logits, rows in raw:
        began = time.thread_time_ns()
        own_ids = token_ids[_index(group.rows, token_ids.device)]
        others = _others(group, token_ids.device)
        logprobs.append((group.rows, compute_logprobs(raw_logits, own_ids, others, rows)))
        share_us = (time.thread_time_ns() - began) // 1000 // len(group.rows)
        for index in group.rows:
            work_us[index] = work_us.get(index, 0) + share_us
    failures = [row for row in batch.edited if row.failure]
    return SampledTokens(token_ids, ~torch.isfinite(top), logprobs, failures, work_us)


def _take_raw(logits: Tensor, group: LogprobGroup, batch: SamplingBatch) -> tuple[Tensor, Int64s | None]:
    """Logits before edits and which of their rows are the group's, None for all: a copy if any is edited."""
    if any(row.index in group.rows for row in batch.edited):
        return logits[_index(group.rows, logits.device)], None
    return logits, np.array(group.rows, dtype=np.int64)


def _edit(logits: Tensor, batch: SamplingBatch) -> Int64s | None:
    """Apply the rows' edits; returns masks that are left to the sampler, as `launch_sample` takes them."""
    masks = compute_masks(batch.edited, len(logits)) if batch.masks is None else batch.masks
    if masks is None or sum(len(row.edits) for row in batch.edited) > len(masks.places):
        apply_logit_edits(logits, batch.edited, ALL_BUT_GRAMMAR)
    if masks is None:
        return None
    if choose_kernel("sample", logits.dtype, logits.device) == "native":
        masks.apply_ends(logits)
        return masks.addresses
    masks.apply(logits)
    return None


def _choose_tokens(logits: Tensor, batch: SamplingBatch, masks: Int64s | None) -> tuple[Tensor, Tensor]:
    """(token ids int64 [S], the largest logit of each row [S]). `masks` as `launch_sample` takes them."""
    chosen = choose_kernel("sample", logits.dtype, logits.device)
    if chosen == "triton":
        return _choose_with_triton(logits, batch)
    if chosen == "native":
        noise = uniform_noise(batch.seeds, batch.output_positions) if batch.noise is None else batch.noise
        filters = batch.temperature, batch.top_k, batch.top_p, batch.min_p
        return launch_sample(native_library(), logits, *filters, noise, masks)
    token_ids = argmax_rows(logits)
    top = logits.gather(1, token_ids[:, None])  # [S, 1]
    is_random = batch.temperature > 0
    if is_random.any():
        _sample_random(logits, top, batch, is_random, token_ids)
    return token_ids, top[:, 0]


def _choose_with_triton(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    from ...kernels.sampling import sample_triton

    has_filters = (batch.top_k < logits.shape[1]) | (batch.top_p < 1.0) | (batch.min_p > 0.0)
    is_random = batch.temperature > 0
    scale = np.divide(1.0, batch.temperature, out=np.zeros_like(batch.temperature), where=is_random)
    noise = uniform_noise(batch.seeds, batch.output_positions)
    columns = (scale, batch.top_k, batch.top_p, batch.min_p, noise)
    parameters = to_device(np.stack(columns, axis=1, dtype=np.float64), logits.device)
    return sample_triton.launch_sample(logits, parameters, bool((has_filters & is_random).any()))


def _others(group: LogprobGroup, device: torch.device) -> int | Tensor:
    """The `others` for `compute_logprobs`."""
    return to_device(np.stack(group.token_ids), device) if group.token_ids else group.num_others


def _index(indexes: list[int], device: torch.device) -> Tensor:
    return to_device(np.array(indexes, dtype=np.int64), device)


def _sample_random(
    logits: Tensor, top: Tensor, batch: SamplingBatch, is_random: NDArray[np.bool_], token_ids: Tensor
) -> None:
    """Overwrite `token_ids` where `is_random`.

    The vocabulary is walked in slices of rows, each summed into blocks while it is in the cache; the block
    that holds the noise's quantile is then looked at again, of all rows at once.
    """
    vocab_size, device = logits.shape[1], logits.device
    is_filtered = (batch.top_k < vocab_size) | (batch.top_p < 1.0) | (batch.min_p > 0.0)
    # Rows with filters come last, so that most slices have only one kind.
    rows = np.concatenate([np.flatnonzero(is_random & (is_filtered == kind)) for kind in (False, True)])
    index = to_device(rows, device)
    top = top[index]
    scale = to_device(1.0 / batch.temperature[rows], device)[:, None]
    thresholds = torch.zeros(len(rows), dtype=torch.float32, device=device)
    sums: list[Tensor] = []
    for part in row_slices(len(rows), vocab_size, device):
        weights = _weigh(logits.index_select(0, index[part]), top[part], scale[part])
        filtered = np.flatnonzero(is_filtered[rows[part]])
        if len(filtered):
            _filter(weights, batch, rows[part], thresholds[part])
        sums.append(block_sums(weights))
    noise = uniform_noise(batch.seeds[rows], batch.output_positions[rows])
    blocks, rest = find_quantile_blocks(torch.cat(sums), to_device(noise, device))
    members, is_there = block_members(blocks, vocab_size)
    weights = _weigh(logits[index[:, None], members], top, scale)
    weights *= is_there & (weights >= thresholds[:, None])
    token_ids[index] = members.gather(1, find_in_block(weights, rest)[:, None])[:, 0]


def _weigh(logits: Tensor, top: Tensor, scale: Tensor) -> Tensor:
    """Probabilities times a constant of the row, in place: the most likely token has weight 1."""
    return logits.sub_(top).mul_(scale).exp_()


def _filter(weights: Tensor, batch: SamplingBatch, rows: Int64s, thresholds: Tensor) -> None:
    """Find the smallest weight that min-p, top-k and top-p of `rows` keep, and set those below to 0.

    In this order, as in vLLM: top-p is of what the others leave. `weights` [R, V] and `thresholds` [R] are
    changed in place.
    """
    device, vocab_size = weights.device, weights.shape[1]
    top_k, top_p = batch.top_k[rows], batch.top_p[rows]
    has_top_k, has_top_p = top_k < vocab_size, top_p < 1.0
    thresholds.copy_(to_device(batch.min_p[rows], device))
    if not (has_top_k.any() or has_top_p.any()):
        keep_at_least(weights, thresholds)
        return
    places = np.where(has_top_k, top_k, 1) - 1
    largest = largest_values(weights, _prefix_size(int(places.max()) + 1, bool(has_top_p.any()), weights))
    kth = largest.gather(1, to_device(places, device)[:, None])[:, 0]
    torch.maximum(thresholds, kth * to_device(has_top_k, device), out=thresholds)
    keep_at_least(weights, thresholds)
    limited = np.flatnonzero(has_top_p)
    if len(limited):
        keep_at_least(largest, thresholds)
        index = to_device(limited, device)
        limits = _top_p_thresholds(weights, largest, index, to_device(top_p[limited], device))
        thresholds[index] = torch.maximum(thresholds[index], limits)
        keep_at_least(weights, thresholds)


def _prefix_size(max_top_k: int, has_top_p: bool, weights: Tensor) -> int:
    """How many of the largest weights are looked at first."""
    vocab_size = weights.shape[1]
    if has_top_p and weights.device.type != "cpu":
        return vocab_size  # a GPU sorts a row faster than it can tell the host whether a prefix was enough
    return min(vocab_size, max(max_top_k, _TOP_P_PREFIX if has_top_p else 1))


def _top_p_thresholds(weights: Tensor, largest: Tensor, index: Tensor, top_p: Tensor) -> Tensor:
    """[P] smallest weight that top-p keeps in the rows `index` [P]: with the larger ones it makes up `top_p`.

    `largest` [R, K] are the K largest weights. Rows that need more than those are sorted.
    """
    targets = top_p * block_sums(weights.index_select(0, index)).cumsum(dim=1)[:, -1]
    thresholds, is_found = _find_top_p(largest.index_select(0, index), targets)
    if largest.shape[1] == weights.shape[1]:
        return thresholds
    missing = torch.nonzero(~is_found)[:, 0]
    if missing.numel():
        rest = weights.index_select(0, index[missing])
        thresholds[missing], _ = _find_top_p(largest_values(rest, weights.shape[1]), targets[missing])
    return thresholds


def _find_top_p(falling: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The weight at which the sum of `falling` weights [P, K] reaches its target, and whether it does.

    0 where it does not: if rounding keeps even a whole row short of its target, nothing is cut off.
    """
    place = torch.searchsorted(falling.double().cumsum(dim=1), targets[:, None])
    is_found = place[:, 0] < falling.shape[1]
    return falling.gather(1, place.clamp_(max=falling.shape[1] - 1))[:, 0] * is_found, is_found
