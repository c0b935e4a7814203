"""Tokens that a row may take, one bit each: bit t % 32 of word t // 32, the layout of grammar engines.

Applying a mask sets the logits of all other tokens to minus infinity. Bytes: reads V / 8, writes up to 4 V a
row. Legend: S rows of logits, R rows with a mask, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def apply_token_bitmask_reference(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Edit float32 `logits` [S, V] in place: row rows[i] by bitmask[i]; int32 [R, W], distinct int64 [R]."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bitmask[:, ids // 32] >> (ids % 32)) & 1
    logits[rows] = torch.where(is_allowed > 0, logits[rows], -torch.inf)


def launch_token_bitmask(library: ctypes.CDLL, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """The same for contiguous tensors on the CPU."""
    library.quire_token_bitmask(logits, logits.shape[1], bitmask, rows, len(rows))
