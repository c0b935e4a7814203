"""Penalties on tokens that a row has seen: x > 0 ? x / r : x r, then x - f count - p (count > 0).

Repetition r is of CTRL (arXiv 1909.05858), frequency f and presence p are OpenAI's. Bytes: reads and writes a
logit, an id and a count for each distinct token seen, whatever the vocabulary.
Legend: S rows of logits, R of them with penalties, V vocabulary, N tokens seen of all rows.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def penalize_reference(logits: Tensor, places: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Edit flat float32 `logits` at `places` (distinct, int64 [N]), seen `counts` times (float32 [N]).

    `penalties` is float32 [3, N]: the repetition, frequency and presence penalty of each place's row.
    """
    repetition, frequency, presence = penalties
    seen = logits[places]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[places] = seen - frequency * counts - presence * (counts > 0)


def launch_penalties(
    library: ctypes.CDLL, logits: Tensor, seen: NDArray[np.int64], factors: NDArray[np.float32]
) -> None:
    """The same for contiguous float32 `logits` [S, V] on the CPU, but that f count is not rounded by itself.

    `seen` [R, 4]: a row, the addresses of its distinct ids (int64) and of their counts (float32), and how
    many they are. `factors` [R, 3]: the row's penalties.
    """
    address, size = logits.data_ptr(), logits.shape[1]
    library.quire_penalize(address, size, seen.ctypes.data, factors.ctypes.data, len(seen))
