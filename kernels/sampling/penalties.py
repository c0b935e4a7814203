"""Penalties on tokens that a row has seen: x > 0 ? x / r : x r, then x - f count - p (count > 0).

Repetition r is of CTRL (arXiv 1909.05858), frequency f and presence p are OpenAI's. Bytes: reads and writes a
logit, an id and a count for each distinct token seen, whatever the vocabulary. Legend: N tokens of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalize_reference(logits: Tensor, places: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Edit flat float32 `logits` at `places` (distinct, int64 [N]), seen `counts` times (float32 [N]).

    `penalties` is float32 [3, N]: the repetition, frequency and presence penalty of each place's row.
    """
    repetition, frequency, presence = penalties
    seen = logits[places]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[places] = seen - frequency * counts - presence * (counts > 0)
