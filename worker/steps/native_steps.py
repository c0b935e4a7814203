"""NativeSteps: a step's way from rows to logits in two native calls, for models that have a `NativeForward`.

It replaces step_inputs.py and the model's Python code in steps that need nothing from between the two: no
prompt logprobs, no tokens that are only on the device, no rotary angles that depend on a request's length.
Legend: T tokens, R requests of a step, S that sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.program.gather_step import RowsTable, StepArrays, launch_gather_step
from ..attention.metadata import KVCaches
from ..models.native_forward import NativeForward
from .block_tables import BlockTables
from .request_rows import RequestRows
from .row_states import RowStates
from .step_inputs import find_types

Int64s = NDArray[np.int64]


class NativeSteps:
    """Computes steps of `rows` and `tables`, whose arrays it knows by address: none may be replaced."""

    def __init__(
        self,
        forward: NativeForward,
        rows: RequestRows,
        tables: BlockTables,
        kv_caches: KVCaches,
        max_tokens: int,
        states: RowStates | None = None,
    ) -> None:
        self._forward = forward
        self._library = forward.library
        self._rows, self._tables = rows, tables
        self._kv_caches, self._states = kv_caches, states
        self._rows_table = make_rows_table(rows, tables, max_tokens)
        self._arrays = StepArrays(max_tokens, *tables.ids.shape)

    def compute(self, row_ids: Int64s, num_tokens: Int64s, sampling: Int64s) -> Tensor:
        """Compute the next `num_tokens` [R] tokens of `row_ids` [R], and advance those rows.

        Returns the logits of those that sample, `sampling` [S] of the R: float32 [S, vocab].
        """
        step = self._arrays.table
        step.num_sampling = len(sampling)
        self._arrays.sampling[: len(sampling)] = sampling
        self._gather(row_ids, num_tokens)
        logits = self._forward.compute_step_logits(step, self._kv_caches)
        self._rows.num_computed[row_ids] += num_tokens
        return logits

    def compute_hidden(self, row_ids: Int64s, num_tokens: Int64s, type_starts: Mapping[int, int]) -> Tensor:
        """As `compute`: the hidden states of all tokens, [T, H].

        `type_starts`: row -> the position from which on its tokens are of type 1.
        """
        step = self._arrays.table
        step.num_sampling = 0
        firsts = self._rows.num_computed[row_ids]
        self._gather(row_ids, num_tokens)
        types = find_types(row_ids, num_tokens, firsts, type_starts)
        hidden = self._forward.compute_step_hidden(step, self._kv_caches, types)
        self._rows.num_computed[row_ids] += num_tokens
        return hidden

    def _gather(self, row_ids: Int64s, num_tokens: Int64s) -> None:
        """Fill the step's arrays."""
        step = self._arrays.table
        launch_gather_step(self._library, self._rows_table, row_ids, num_tokens, step)
        if self._states is not None:
            states = self._states.make(row_ids, num_tokens, self._rows.num_computed[row_ids])
            self._step_states = states  # whose arrays the step points to
            step.set_states(states.states, *states.host_arrays)


def make_rows_table(rows: RequestRows, tables: BlockTables, max_tokens: int) -> RowsTable:
    """Where the arrays are; they must outlive the table."""
    return RowsTable(
        token_ids=rows.token_ids.ctypes.data,
        num_computed=rows.num_computed.ctypes.data,
        num_known=rows.num_known.ctypes.data,
        block_ids=tables.ids.ctypes.data,
        windows=tables.windows.ctypes.data,
        null_blocks=tables.null_blocks.ctypes.data,
        token_stride=rows.token_ids.shape[1],
        table_stride=tables.ids.shape[2],
        group_stride=tables.ids[0].size,
        num_groups=len(tables.ids),
        block_size=tables.block_size,
        max_tokens=max_tokens,
    )
