"""The most likely tokens of each row, equal ones by id, and the rank of one token: 1 + the number above it.

Nothing is rounded, so all implementations agree. Bytes: reads the logits once. Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def likeliest_reference(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [S, count] in falling order, ranks int32 [S]) of float32 [S, V] and int64 [S]."""
    ids = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    ranks = 1 + (logits > logits.gather(1, token_ids[:, None])).sum(dim=1)
    return ids, ranks.int()


def launch_likeliest(
    library: ctypes.CDLL, logits: Tensor, token_ids: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The same for contiguous tensors on the CPU; `count` is at most V."""
    num_rows, size = logits.shape
    ids = torch.empty((num_rows, count), dtype=torch.int64)
    ranks = torch.empty(num_rows, dtype=torch.int32)
    library.quire_likeliest(logits, num_rows, size, token_ids, count, ids, ranks)
    return ids, ranks
