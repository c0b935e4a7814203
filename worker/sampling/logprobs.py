"""Logprobs of given tokens and of the most likely ones, from raw logits. Knows nothing of requests.

Legend: S scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.protocol.messages import LogprobsBlock
from ...kernels.choice import choose_kernel
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
    slices = row_slices(logits.shape[0], logits.shape[1], logits.device)
    parts = [
        _compute_slice(logits[part], token_ids[part], others if isinstance(others, int) else others[part])
        for part in slices
    ]
    return parts[0] if len(parts) == 1 else join_logprobs(parts)


def join_logprobs(parts: list[LogprobsTensors]) -> LogprobsTensors:
    """The positions of `parts` one after the other."""
    token_ids, logprobs, ranks = zip(*parts, strict=True)
    return LogprobsTensors(torch.cat(token_ids), torch.cat(logprobs), torch.cat(ranks))


def pack_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]) -> LogprobsBlock:
    """The wire form of host copies of LogprobsTensors, or of some of their positions."""
    num_positions, width = token_ids.shape
    return LogprobsBlock(num_positions, width, token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def _compute_slice(logits: Tensor, token_ids: Tensor, others: int | Tensor) -> LogprobsTensors:
    log_totals, ranks = _sum_and_rank(logits, token_ids)
    ids = token_ids[:, None]
    if not isinstance(others, int):
        ids = torch.cat((ids, others), dim=1)
    elif others:
        ids = torch.cat((ids, largest_ids(logits, others)), dim=1)
    logprobs = (logits.gather(1, ids).double() - log_totals[:, None]).float()
    return LogprobsTensors(ids.to(torch.int32), logprobs, ranks)


def _sum_and_rank(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels/sampling/log_totals.py."""
    if choose_kernel("log_totals", logits.dtype, logits.device) == "triton":
        from ...kernels.sampling.log_totals_triton import launch_log_totals

        return launch_log_totals(logits, token_ids)
    top = logits.amax(dim=1, keepdim=True)
    sums = block_sums((logits - top).exp_()).cumsum(dim=1)
    # Counted in float32, which is exact up to 2**24 tokens and 5 times faster than summing booleans.
    is_above = torch.gt(logits, logits.gather(1, token_ids[:, None]), out=torch.empty_like(logits))
    ranks = 1 + is_above.sum(dim=1)
    return top[:, 0].double() + sums[:, -1].log(), ranks.to(torch.int32)
