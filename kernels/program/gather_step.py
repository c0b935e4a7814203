"""A step's inputs from the rows of its requests: what worker/steps/step_inputs.py does in numpy, in one call.

RowsTable mirrors QuireRows of gather_step.cpp and holds addresses only: who fills it in keeps the arrays.
Bytes: reads and writes some 30 for each token and 4 for each block of a request.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from .program import StepTable

_FAILURES = {
    1: "the core scheduled tokens that are not known",
    2: "the core scheduled more tokens than a step may have",
}


class RowsTable(ctypes.Structure):
    """QuireRows."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "num_computed", "num_known", "block_ids")),
        *((name, ctypes.c_void_p) for name in ("windows", "null_blocks")),
        *((name, ctypes.c_int64) for name in ("token_stride", "table_stride", "group_stride")),
        *((name, ctypes.c_int32) for name in ("block_size", "max_tokens", "num_groups", "padding")),
    )


class StepArrays:
    """The arrays of one step, as large as any step needs them, and the table that points to them."""

    def __init__(self, max_tokens: int, num_groups: int, max_requests: int, max_blocks: int) -> None:
        self.input_ids: NDArray[np.int64] = np.zeros(max_tokens, dtype=np.int64)
        self.positions: NDArray[np.int64] = np.zeros(max_tokens, dtype=np.int64)
        self.slots: NDArray[np.int64] = np.zeros(num_groups * max_tokens, dtype=np.int64)
        self.sampling: NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
        self.query_starts: NDArray[np.int32] = np.zeros(max_requests + 1, dtype=np.int32)
        self.seq_lens: NDArray[np.int32] = np.zeros(max_requests, dtype=np.int32)
        # Tables and slots of a step lie close, [G, R, W] and [G, T]: its sizes change from step to step.
        self.block_tables: NDArray[np.int32] = np.zeros(
            num_groups * max_requests * max_blocks, dtype=np.int32
        )
        self.table = StepTable(**{name: array.ctypes.data for name, array in vars(self).items()})


def launch_gather_step(
    library: ctypes.CDLL,
    rows: RowsTable,
    row_ids: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    step: StepTable,
) -> None:
    """Fill the arrays that `step` points to, but for cos, sin and sampling, and set its other counts.

    Requests are taken in the order of `row_ids`, each with its next `num_tokens` tokens. Raises
    AssertionError for tokens that are not known, or more of them than `rows.max_tokens`.
    """
    failure = library.quire_gather_step(
        ctypes.addressof(rows),
        row_ids.ctypes.data,
        num_tokens.ctypes.data,
        len(row_ids),
        ctypes.addressof(step),
    )
    assert not failure, _FAILURES[failure]
