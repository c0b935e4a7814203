"""Grammar: the edit of a row whose output follows a grammar. Legend: S sampling rows, V vocabulary."""

from __future__ import annotations

import sys
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .grammars import Grammars, Matcher
from .logit_edit import EditedRows, Ids, LogitEdit, RowStart, keep_only


class Grammar(LogitEdit["Grammar"]):
    """Allows what the row's grammar can go on with, and the end of sequence where the output may end.

    It comes last: whatever other edits do, nothing can be sampled that the grammar refuses. Where it leaves
    only the end of sequence the row ends, whatever forbids that (min_tokens, ignore_eos, allowed_token_ids).
    """

    needs_history = True

    def __init__(self, start: RowStart, grammars: Grammars) -> None:
        params = start.request.sampling_params
        self._grammars, self._text = grammars, start.request.grammar
        self._output = start.output.tolist()
        self._matcher: Matcher | None = None  # made when the row samples first: the device works by then
        self._min_output = sys.maxsize if params.ignore_eos else params.min_tokens

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        if not start.request.grammar:
            return None
        assert start.grammars is not None
        return cls(start, start.grammars)

    def append(self, token: int) -> None:
        """The matcher goes on with the token."""
        if self._matcher is None:
            self._output.append(token)
        else:
            self._matcher.consume(token)

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[Grammar]) -> None:
        masks, indexes, is_masked = cls._compute_masks(logits, rows)
        if is_masked.any():
            keep_only(logits, masks[is_masked], indexes[is_masked])

    @classmethod
    def find_masks(cls, logits: Tensor, rows: EditedRows[Grammar], addresses: Ids) -> None:
        """In place of `apply`, for a sampler that takes masks: their addresses [S], until the next call."""
        masks, indexes, is_masked = cls._compute_masks(logits, rows)
        found = masks.ctypes.data + masks.strides[0] * np.arange(len(masks))
        addresses[indexes[is_masked]] = found[is_masked]

    @classmethod
    def _compute_masks(
        cls, logits: Tensor, rows: EditedRows[Grammar]
    ) -> tuple[NDArray[np.int32], Ids, NDArray[np.bool_]]:
        """Of each of `rows`: its mask, its place among the S, and whether the mask is to be applied.

        It is not where the grammar has failed, and where only the end is left: that is in `logits` then.
        """
        grammars = rows[0][1]._grammars
        matchers = [edit._find_matcher() for _, edit in rows]
        masks = grammars.compute_masks(matchers)
        is_masked = np.ones(len(rows), dtype=np.bool_)
        for place, ((row, _), matcher) in enumerate(zip(rows, matchers, strict=True)):
            if matcher.failure:
                row.failure = matcher.failure
                is_masked[place] = False
        for place in np.flatnonzero(is_masked & grammars.find_ends(masks)).tolist():
            row, edit = rows[place]
            is_early = row.num_output < edit._min_output or not matchers[place].is_accepting
            if grammars.must_end(masks[place], is_early):
                is_masked[place] = False
                logits[row.index].fill_(-torch.inf)
                logits[row.index, grammars.eos_token_ids[0]] = 0.0
        return masks, np.array([row.index for row, _ in rows], dtype=np.int64), is_masked

    def _find_matcher(self) -> Matcher:
        if self._matcher is None:
            self._matcher = self._grammars.make_matcher(self._text, self._output)
        return self._matcher
