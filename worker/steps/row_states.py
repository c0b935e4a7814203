"""RowStates: which slot holds each row's recurrent states, and what a step saves of them.

The core owns the slots' numbers, and says what is copied and saved (ipc/protocol/step.py).
Legend: R requests of a step, S saves, N rows (max_num_seqs).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.protocol.step import SchedulerOutput
from ..attention.metadata import StepStates
from .staging import send_together

Int64s = NDArray[np.int64]


class RowStates:
    """Keeps the slots of rows over `states`, float32 [num_slots, slot_numbers]."""

    def __init__(self, states: Tensor, max_num_seqs: int) -> None:
        self._states = states
        self._slots: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self._saves: list[tuple[int, int, int]] = []

    def apply(self, step: SchedulerOutput) -> None:
        """Give new requests their slots and make the copies, before `make` for the same step."""
        for request in step.new_requests:
            assert request.state_slot is not None, "a request of a hybrid without a state slot"
            self._slots[request.row] = request.state_slot
        for source, destination in step.state_copies:
            self._states[destination].copy_(self._states[source])
        self._saves = step.state_saves

    def make(self, row_ids: Int64s, num_tokens: Int64s, num_computed: Int64s) -> StepStates:
        """What recurrent layers need, of the step whose requests [R] compute `num_tokens` [R] tokens after
        `num_computed` [R] others.
        """
        slots = self._slots[row_ids]
        starts, tokens, save_slots = self._place_saves(row_ids, num_tokens, num_computed)
        sent = send_together((slots, starts, tokens, save_slots), self._states.device)
        return StepStates(self._states, sent[0], sent[1], sent[2], sent[3], slots, starts, tokens, save_slots)

    def _place_saves(
        self, row_ids: Int64s, num_tokens: Int64s, num_computed: Int64s
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Starts [R + 1], tokens [S] and slots [S] of the saves."""
        if not self._saves:
            return np.zeros(len(row_ids) + 1, np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
        places = {row: place for place, row in enumerate(row_ids.tolist())}
        firsts = (np.cumsum(num_tokens) - num_tokens - num_computed).tolist()  # token of position 0
        saves = sorted((firsts[places[row]] + n - 1, places[row], slot) for row, n, slot in self._saves)
        tokens, requests, slots = np.array(saves, dtype=np.int32).T.copy()
        starts = np.searchsorted(requests, np.arange(len(row_ids) + 1)).astype(np.int32)
        return starts, tokens, slots
