"""The embedding: a table of tokens; in some models others of positions and types, and a norm of the sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel
from ...kernels.program.gather_rows import gather_rows_reference
from ...kernels.program.program import AddRows, Embed, Kind, Program, Scale, Slot
from .collectives import VocabParallelLookup
from .norm import LayerNorm, RMSNorm


class Embedding:
    """Rows of `table` [vocab, hidden] by token id, multiplied by `scale` where there is one.

    Then `norm` of their sum with rows of `types` [types, hidden] and of `positions` [max_model_len, hidden],
    where a model has them. With `part` the table is a rank's part of the vocabulary's.
    """

    def __init__(
        self,
        table: Tensor,
        scale: float | None = None,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        norm: LayerNorm | RMSNorm | None = None,
        part: VocabParallelLookup | None = None,
        rounds_scale: bool = True,
    ) -> None:
        """`rounds_scale`: to the table's type, as most models were trained."""
        self.table = table
        is_rounded = scale is not None and rounds_scale
        self._scale = torch.tensor(scale).to(table.dtype).item() if is_rounded else scale
        self._positions, self._types, self._norm = positions, types, norm
        self._part = part
        self._gather = _choose_kernel(table)
        self._look_up = self._gather if part is None else part.gather

    def __call__(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """[T, hidden] for int64 [T] each; without `token_types` all are 0."""
        rows = self._look_up(self.table, input_ids)
        if self._scale is not None:
            rows.mul_(self._scale)
        if self._types is not None:
            rows += self._types[0] if token_types is None else self._gather(self._types, token_types)
        if self._positions is not None:
            rows += self._gather(self._positions, positions)
        return rows if self._norm is None else self._norm(rows)

    def emit(self, program: Program, y: Slot) -> None:
        """The same as operations."""
        size, part = self.table.shape[1], self._part
        operation = Embed(table=self.table.data_ptr(), y=y, size=size)
        if part is not None:
            operation.first, operation.num_rows = part.first, len(self.table)
        program.add(Kind.EMBED, operation)
        if part is not None:
            part.all_reduce.emit(program, y)
        if self._scale is not None:
            program.add(Kind.SCALE, Scale(x=y, size=size, factor=self._scale))
        for table, by_type in ((self._types, 1), (self._positions, 0)):
            if table is not None:
                operation = AddRows(table=table.data_ptr(), x=y, size=size, by_type=by_type)
                program.add(Kind.ADD_ROWS, operation)
        if self._norm is not None:
            self._norm.emit(program, y, y)


class StageInput:
    """Stands where a later stage of a pipeline has no embedding: hidden states of the stage before it.

    They are in the first rows of `table` [max tokens of a step, hidden], put there before each step.
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """[T, hidden] for T tokens; a copy, for the layers add to it."""
        return self.table[: len(input_ids)].clone()

    def emit(self, program: Program, y: Slot) -> None:
        """The same as an operation."""
        program.add(Kind.LOAD, Embed(table=self.table.data_ptr(), y=y, size=self.table.shape[1]))


def _choose_kernel(table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    if choose_kernel("gather_rows", table.dtype, table.device) == "torch":
        return gather_rows_reference
    from ...kernels.program.gather_rows_triton import launch_gather_rows

    return launch_gather_rows
