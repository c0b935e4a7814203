"""A step's requests and their states, as recurrent operations take them; it knows nothing of what a state is.

Legend: R requests, T tokens of the step, S saves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

_POINTERS = "states slots query_starts seq_lens save_starts save_tokens save_slots"


class StatesTable(ctypes.Structure):
    """QuireStates of states.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        ("slot_size", ctypes.c_int64),
        ("num_requests", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    ]


class TokenRun(NamedTuple):
    """Tokens [first, end) of a step, of one request; then its state goes to the slots `saves` too."""

    slot: int
    first: int
    end: int
    begins: bool  # the first stands at position 0: the state before it is zeros
    saves: list[int]


@dataclass(frozen=True, slots=True)
class RequestStates:
    """Which numbers are a request's state: those of its slot from an operation's `offset` on.

    Integers are int32 and contiguous on the states' device. A request whose first token stands at position 0
    begins from zeros, whatever its slot has.
    """

    states: Tensor  # float32 [slots, numbers of a slot]
    slots: Tensor  # [R]
    query_starts: Tensor  # [R + 1]; the last entry is T
    seq_lens: Tensor  # [R] with the step's tokens
    save_starts: Tensor  # [R + 1]: request r has the saves save_starts[r] .. save_starts[r + 1] - 1
    save_tokens: Tensor  # [S] number of a token among the T, after which its state also goes to a slot
    save_slots: Tensor  # [S]

    def to_table(self) -> StatesTable:
        """For the CPU's kernels; valid while this object lives."""
        tensors = {name: getattr(self, name).data_ptr() for name in _POINTERS.split()}
        return StatesTable(**tensors, slot_size=self.states.stride(0), num_requests=len(self.slots))

    def list_runs(self) -> Iterator[TokenRun]:
        """Requests' tokens in their order, cut where a state is saved."""
        starts, lengths, slots, save_starts, tokens, targets = (
            each.tolist()
            for each in (
                self.query_starts,
                self.seq_lens,
                self.slots,
                self.save_starts,
                self.save_tokens,
                self.save_slots,
            )
        )
        for request, slot in enumerate(slots):
            first, end = starts[request], starts[request + 1]
            position = lengths[request] - (end - first)
            saves: dict[int, list[int]] = {}
            for index in range(save_starts[request], save_starts[request + 1]):
                saves.setdefault(tokens[index] + 1, []).append(targets[index])
            for last in sorted({*saves, end}):
                if first < last:
                    yield TokenRun(slot, first, last, position == 0, saves.get(last, []))
                first, position = last, 1
