"""Logprobs of given tokens and of the most likely ones, from raw logits. Knows nothing of requests.

Legend: S scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.protocol.messages import LogprobsBlock
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.logprobs import launch_logprobs
from ..steps.row_ops import block_sums, largest_ids, row_slices
from ..steps.staging import to_device


class LogprobsTensors(NamedTuple):
    """Entry 0 of a position is the token itself, then K others: those asked for, in their order, or the most
    likely ones, equals by token id.
    """

    token_ids: Tensor  # int32 [S, 1 + K]
    logprobs: Tensor  # float32 [S, 1 + K]
    ranks: Tensor  # int32 [S], 1 + the number of tokens that are more likely


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, others: int | Tensor, rows: NDArray[np.int64] | None = None
) -> LogprobsTensors:
    """log_softmax of float32 `logits` [N, V] at `token_ids` [S] and at `others`; bounded temporaries.

    others: K, for the K largest of each row, or the ids themselves, int64 [S, K].
    rows: which S of the N rows, None for all.
    """
    if choose_kernel("logprobs", logits.dtype, logits.device) == "native":
        places = np.arange(len(logits)) if rows is None else rows
        addresses = logits.data_ptr() + places * (logits.stride(0) * logits.itemsize)
        others = others if isinstance(others, int) else others.contiguous()
        return LogprobsTensors(
            *launch_logprobs(native_library(), addresses, logits.shape[1], token_ids.contiguous(), others)
        )
    if rows is not None:
        logits = logits[to_device(rows, logits.device)]
    slices = [
        _compute_slice(logits[part], token_ids[part], others if isinstance(others, int) else others[part])
        for part in row_slices(logits.shape[0], logits.shape[1], logits.device)
    ]
    return slices[0] if len(slices) == 1 else join_logprobs(slices)


def join_logprobs(parts: list[LogprobsTensors]) -> LogprobsTensors:
    """The positions of `parts` one after the other."""
    token_ids, logprobs, ranks = zip(*parts, strict=True)
    return LogprobsTensors(torch.cat(token_ids), torch.cat(logprobs), torch.cat(ranks))


def pack_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]) -> LogprobsBlock:
    """The wire form of host copies of LogprobsTensors."""
    num_positions, width = token_ids.shape
    return LogprobsBlock(num_positions, width, token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def pack_positions(
    token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]
) -> list[LogprobsBlock]:
    """As `pack_logprobs`, a block a position. Slices of bytes take a quarter of what slices of arrays do."""
    num_positions, width = token_ids.shape
    id_bytes, logprob_bytes, rank_bytes = token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes()
    size = 4 * width
    return [
        LogprobsBlock(
            1,
            width,
            id_bytes[place * size : place * size + size],
            logprob_bytes[place * size : place * size + size],
            rank_bytes[place * 4 : place * 4 + 4],
        )
        for place in range(num_positions)
    ]


def _compute_slice(logits: Tensor, token_ids: Tensor, others: int | Tensor) -> LogprobsTensors:
    log_totals, ranks = _sum_and_rank(logits, token_ids)
    if isinstance(others, int):
        others = largest_ids(logits, others) if others else token_ids.new_empty((len(token_ids), 0))
    ids = torch.cat((token_ids[:, None], others), dim=1)
    logprobs = (logits.gather(1, ids).double() - log_totals[:, None]).float()
    return LogprobsTensors(ids.to(torch.int32), logprobs, ranks)


def _sum_and_rank(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels/sampling/log_totals.py."""
    if choose_kernel("log_totals", logits.dtype, logits.device) == "triton":
        from ...kernels.sampling.log_totals_triton import launch_log_totals

        return launch_log_totals(logits, token_ids)
    top = logits.amax(dim=1, keepdim=True)
    weights = (logits - top).exp_()
    log_totals = top[:, 0].double() + block_sums(weights).cumsum(dim=1)[:, -1].log()
    # Counted in float32, which is exact up to 2**24 tokens and 5 times faster than summing booleans.
    is_above = torch.gt(logits, logits.gather(1, token_ids[:, None]), out=weights)
    return log_totals, (1 + is_above.sum(dim=1)).to(torch.int32)
