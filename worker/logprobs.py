"""Logprobs of given tokens and of the most likely ones, from raw logits. Knows nothing of requests.

Legend: S scored positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ipc.messages import LogprobsBlock
from .row_ops import block_sums, largest_values, row_slices

_LOW_32_BITS = 0xFFFFFFFF


class LogprobsTensors(NamedTuple):
    """Entry 0 of a position is the token itself, then the K most likely ones, equals by token id."""

    token_ids: Tensor  # int32 [S, 1 + K]
    logprobs: Tensor  # float32 [S, 1 + K]
    ranks: Tensor  # int32 [S], 1 + the number of tokens that are more likely


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_alternatives: int) -> LogprobsTensors:
    """log_softmax of float32 `logits` [S, V] at `token_ids` [S] and at the K largest; bounded temporaries."""
    slices = row_slices(logits.shape[0], logits.shape[1], logits.device)
    parts = [_compute_slice(logits[part], token_ids[part], num_alternatives) for part in slices]
    return parts[0] if len(parts) == 1 else join_logprobs(parts)


def join_logprobs(parts: list[LogprobsTensors]) -> LogprobsTensors:
    """The positions of `parts` one after the other."""
    token_ids, logprobs, ranks = zip(*parts, strict=True)
    return LogprobsTensors(torch.cat(token_ids), torch.cat(logprobs), torch.cat(ranks))


def pack_logprobs(token_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]) -> LogprobsBlock:
    """The wire form of host copies of LogprobsTensors, or of some of their positions."""
    num_positions, width = token_ids.shape
    return LogprobsBlock(num_positions, width, token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def _compute_slice(logits: Tensor, token_ids: Tensor, num_alternatives: int) -> LogprobsTensors:
    top = logits.amax(dim=1, keepdim=True)
    sums = block_sums((logits - top).exp_()).cumsum(dim=1)
    log_total = top.double() + sums[:, -1:].log()
    own = token_ids[:, None]
    ranks = 1 + (logits > logits.gather(1, own)).sum(dim=1)
    ids = torch.cat((own, _most_likely(logits, num_alternatives)), dim=1)
    logprobs = (logits.gather(1, ids).double() - log_total).float()
    return LogprobsTensors(ids.to(torch.int32), logprobs, ranks.to(torch.int32))


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """int64 [S, K] ids of the largest logits in falling order, equal ones by id.

    A key holds the logit's bits, made to order like integers, above the id counted from the end: one
    selection of values then gives an exact order on every device.
    """
    size = logits.shape[1]
    if count == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # the sum makes -0.0 a 0.0, its equal
    ordered = bits ^ ((bits >> 31) & np.iinfo(np.int32).max)
    keys = ordered.to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(size - 1, -1, -1, device=logits.device)
    return size - 1 - (largest_values(keys, count) & _LOW_32_BITS)
