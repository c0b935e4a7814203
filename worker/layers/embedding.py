"""The token embedding: a table and a lookup."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class Embedding:
    """Rows of `table` [vocab, hidden] by token id."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T, hidden] for int64 [T]."""
        return F.embedding(input_ids, self.table)
