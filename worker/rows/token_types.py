"""Types of a step's tokens: 1 of the second text of a pair, else 0."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


def find_types(
    row_ids: Int64s, num_tokens: Int64s, firsts: Int64s, type_starts: Mapping[int, int]
) -> Int64s | None:
    """int64 [T]: the types of the tokens, whose rows begin at positions `firsts`; None if all are 0."""
    rows = row_ids.tolist()
    if type_starts.keys().isdisjoint(rows):
        return None
    never = np.iinfo(np.int64).max
    starts = np.array([type_starts.get(row, never) for row in rows])
    ends = np.cumsum(num_tokens)
    positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - num_tokens), num_tokens)
    return (positions >= np.repeat(starts, num_tokens)).astype(np.int64)
