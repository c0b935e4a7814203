"""Penalties of rows: which tokens each has seen and how often it wrote them, kept up token by token.

The prompt counts for repetition only, the output for all three penalties (OpenAI's and CTRL's definitions).
Legend: S sampling rows, V vocabulary.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor

from ...kernels.choice import choose_kernel
from ...kernels.penalties import penalize_reference
from ..rows.staging import to_device
from .logit_edit import EditedRows, LogitEdit, RowStart, find_places, join


class Penalties(LogitEdit["Penalties"]):
    """repetition_penalty, frequency_penalty, presence_penalty of the distinct tokens of a row.

    A dict finds a token's place, two arrays hold the ids and counts, so that a step costs one append and the
    sampler reads arrays whose length is the number of distinct tokens.
    """

    needs_history = True

    def __init__(self, start: RowStart) -> None:
        params = start.request.sampling_params
        self._factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        # Without a repetition penalty the prompt has no say, and its tokens need no place.
        seen: list[int] = np.unique(start.prompt).tolist() if params.repetition_penalty != 1.0 else []
        self._place_of = {token: place for place, token in enumerate(seen)}
        self._ids = np.array(seen, dtype=np.int64)
        self._counts = np.zeros(len(seen), dtype=np.float32)  # in the output; 0 for those of the prompt
        for token in start.output.tolist():
            self.append(token)

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        params = start.request.sampling_params
        is_off = (
            params.repetition_penalty == 1.0 and params.frequency_penalty == params.presence_penalty == 0.0
        )
        return None if is_off else cls(start)

    def append(self, token: int) -> None:
        """Count `token`."""
        place = self._place_of.setdefault(token, len(self._place_of))
        if place == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate((self._ids, np.zeros(room, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.float32)))
        self._ids[place] = token
        self._counts[place] += 1.0

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[Penalties]) -> None:
        device, sizes = logits.device, [len(edit._place_of) for _, edit in rows]
        places = find_places(logits, [(row, edit._ids[: len(edit._place_of)]) for row, edit in rows])
        counts = join([edit._counts[: len(edit._place_of)] for _, edit in rows], device)
        factors = np.array([edit._factors for _, edit in rows], dtype=np.float32)
        penalties = to_device(np.repeat(factors.T, sizes, axis=1), device)
        if choose_kernel("penalties", torch.float32, device) == "triton":
            from ...kernels.penalties_triton import launch_penalties as penalize
        else:
            penalize = penalize_reference
        penalize(logits.view(-1), places, counts, penalties)
