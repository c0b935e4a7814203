"""Rows of a table by index, y[i] = table[index[i]]: the token embedding, and the last token of each request.

Bytes: reads and writes n D values. Legend: n rows, D row length.
"""

from __future__ import annotations

from torch import Tensor


def gather_rows_reference(table: Tensor, index: Tensor) -> Tensor:
    """[n, D] of a table [rows, D] for int64 `index` [n], every one below `rows`."""
    return table.index_select(0, index)
