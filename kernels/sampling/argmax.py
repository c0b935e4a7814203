"""Greedy sampling: the index of each row's maximum, the lowest of equals, or of its first NaN.

Bytes: reads the logits once. Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def argmax_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(index int64 [S], bool [S]: true where the value there is not finite) of float32 [S, V]."""
    index = torch.from_numpy(logits.numpy().argmax(axis=-1))
    return index, ~torch.isfinite(logits.gather(1, index[:, None])[:, 0])


def launch_argmax(library: ctypes.CDLL, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same for contiguous logits on the CPU."""
    num_rows, size = logits.shape
    index = torch.empty(num_rows, dtype=torch.int64)
    is_bad = torch.empty(num_rows, dtype=torch.bool)
    library.quire_argmax(logits.data_ptr(), num_rows, size, index.data_ptr(), is_bad.data_ptr())
    return index, is_bad
