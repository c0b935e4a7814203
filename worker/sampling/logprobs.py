"""Logprobs of given tokens and of the most likely ones, from raw logits. Knows nothing of requests.

Legend: S scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.protocol.messages import LogprobsBlock
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.likeliest import launch_likeliest
from ..steps.row_ops import block_sums, largest_ids, row_slices


class LogprobsTensors(NamedTuple):
    """Entry 0 of a position is the token itself, then K others: those asked for, in their order, or the most
    likely ones, equals by token id.
    """

    token_ids: Tensor  # int32 [S, 1 + K]
    logprobs: Tensor  # float32 [S, 1 + K]
    ranks: Tensor  # int32 [S], 1 + the number of tokens that are more likely


def compute_logprobs(logits: Tensor, token_ids: Tensor, others: int | Tensor) -> LogprobsTensors:
    """log_softmax of float32 `logits` [S, V] at `token_ids` [S] and at `others`; bounded temporaries.

    others: K, for the K largest of each row, or the ids themselves, int64 [S, K].
    """
    parts = list(row_slices(logits.shape[0], logits.shape[1], logits.device))
    if choose_kernel("likeliest", logits.dtype, logits.device) == "native":
        return _compute_native(logits.contiguous(), token_ids.contiguous(), others, parts)
    slices = [
        _compute_slice(logits[part], token_ids[part], others if isinstance(others, int) else others[part])
        for part in parts
    ]
    return slices[0] if len(slices) == 1 else join_logprobs(slices)


def join_logprobs(parts: list[LogprobsTensors]) -> LogprobsTensors:
    """The positions of `parts` one after the other."""
    token_ids, logprobs, ranks = zip(*parts, strict=True)
    return LogprobsTensors(torch.cat(token_ids), torch.cat(logprobs), torch.cat(ranks))


def pack_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]) -> LogprobsBlock:
    """The wire form of host copies of LogprobsTensors, or of some of their positions."""
    num_positions, width = token_ids.shape
    return LogprobsBlock(num_positions, width, token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def _compute_native(
    logits: Tensor, token_ids: Tensor, others: int | Tensor, parts: list[slice]
) -> LogprobsTensors:
    count = others if isinstance(others, int) else 0
    likeliest, ranks = launch_likeliest(native_library(), logits, token_ids, count)
    log_totals = torch.empty(len(logits), dtype=torch.float64)
    scratch = torch.empty_like(logits[parts[0]])  # kept: a new one costs its page faults, slice by slice
    for part in parts:
        log_totals[part] = _sum_exp(logits[part], scratch)
    others = likeliest if isinstance(others, int) else others
    return _gather(logits, token_ids, others, log_totals, ranks)


def _compute_slice(logits: Tensor, token_ids: Tensor, others: int | Tensor) -> LogprobsTensors:
    log_totals, ranks = _sum_and_rank(logits, token_ids)
    if isinstance(others, int):
        others = largest_ids(logits, others) if others else token_ids.new_empty((len(token_ids), 0))
    return _gather(logits, token_ids, others, log_totals, ranks)


def _gather(
    logits: Tensor, token_ids: Tensor, others: Tensor, log_totals: Tensor, ranks: Tensor
) -> LogprobsTensors:
    ids = torch.cat((token_ids[:, None], others), dim=1)
    logprobs = (logits.gather(1, ids).double() - log_totals[:, None]).float()
    return LogprobsTensors(ids.to(torch.int32), logprobs, ranks)


def _sum_and_rank(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels/sampling/log_totals.py."""
    if choose_kernel("log_totals", logits.dtype, logits.device) == "triton":
        from ...kernels.sampling.log_totals_triton import launch_log_totals

        return launch_log_totals(logits, token_ids)
    scratch = torch.empty_like(logits)
    log_totals = _sum_exp(logits, scratch)
    # Counted in float32, which is exact up to 2**24 tokens and 5 times faster than summing booleans.
    is_above = torch.gt(logits, logits.gather(1, token_ids[:, None]), out=scratch)
    return log_totals, (1 + is_above.sum(dim=1)).to(torch.int32)


def _sum_exp(logits: Tensor, scratch: Tensor) -> Tensor:
    """float64 [S] log(sum(exp(logits))); `scratch` has room for [S, V]."""
    top = logits.amax(dim=1, keepdim=True)
    weights = torch.sub(logits, top, out=scratch[: len(logits)]).exp_()
    return top[:, 0].double() + block_sums(weights).cumsum(dim=1)[:, -1].log()
