"""The token embedding: a table and a lookup."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.choice import choose_kernel
from ...kernels.gather_rows import gather_rows_reference
from ...kernels.program import Embed, Kind, Program, Scale, Slot


class Embedding:
    """Rows of `table` [vocab, hidden] by token id, multiplied by `scale` where there is one."""

    def __init__(self, table: Tensor, scale: float | None = None) -> None:
        self.table = table
        # Rounded to the table's type, as the models were trained.
        self._scale = None if scale is None else torch.tensor(scale).to(table.dtype).item()
        self._gather = _choose_kernel(table)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T, hidden] for int64 [T]."""
        rows = self._gather(self.table, input_ids)
        return rows if self._scale is None else rows.mul_(self._scale)

    def emit(self, program: Program, y: Slot) -> None:
        """The same as an operation."""
        size = self.table.shape[1]
        program.add(Kind.EMBED, Embed(table=self.table.data_ptr(), y=y, size=size))
        if self._scale is not None:
            program.add(Kind.SCALE, Scale(x=y, size=size, factor=self._scale))


def _choose_kernel(table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    if choose_kernel("gather_rows", table.dtype, table.device) == "torch":
        return gather_rows_reference
    from ...kernels.gather_rows_triton import launch_gather_rows

    return launch_gather_rows
