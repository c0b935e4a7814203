"""Logprobs of each row's token and of others, the most likely ones (equal ones by id) or those asked for; and
the token's rank: 1 + the number above it.

A logprob is x - max - log(sum(exp(row - max))) in float64, rounded once. How the sum is rounded differs; ids
and ranks are exact, so all agree. Bytes: reads the logits once. Legend: S rows, V vocabulary, K others.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def logprobs_reference(
    logits: Tensor, token_ids: Tensor, others: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int32 [S, 1 + K], logprobs float32 [S, 1 + K], ranks int32 [S]) of float32 [S, V] and int64 [S].

    others: K, or int64 [S, K].
    """
    if isinstance(others, int):
        others = logits.sort(dim=1, descending=True, stable=True).indices[:, :others]
    ids = torch.cat((token_ids[:, None], others), dim=1)
    ranks = 1 + (logits > logits.gather(1, token_ids[:, None])).sum(dim=1)
    return ids.int(), logits.double().log_softmax(dim=1).gather(1, ids).float(), ranks.int()


def launch_logprobs(
    library: ctypes.CDLL, rows: NDArray[np.int64], size: int, token_ids: Tensor, others: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for contiguous tensors on the CPU: `rows` are the addresses of float32 [V], `size` is V."""
    count, other_ids = (others, 0) if isinstance(others, int) else (others.shape[1], others.data_ptr())
    num_rows = len(rows)
    ids = torch.empty((num_rows, 1 + count), dtype=torch.int32)
    logprobs = torch.empty((num_rows, 1 + count), dtype=torch.float32)
    ranks = torch.empty(num_rows, dtype=torch.int32)
    library.quire_logprobs(
        rows.ctypes.data,
        num_rows,
        size,
        token_ids.data_ptr(),
        other_ids,
        count,
        ids.data_ptr(),
        logprobs.data_ptr(),
        ranks.data_ptr(),
    )
    return ids, logprobs, ranks
