"""The token embedding: a table and a lookup."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.gather_rows import gather_rows_reference
from ...kernels.triton_runtime import can_use_triton


class Embedding:
    """Rows of `table` [vocab, hidden] by token id."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self._gather = choose_gather(table.device)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T, hidden] for int64 [T]."""
        return self._gather(self.table, input_ids)


def choose_gather(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel that takes rows of a table by index."""
    if can_use_triton(device):
        from ...kernels.gather_rows_triton import launch_gather_rows

        return launch_gather_rows
    return gather_rows_reference
