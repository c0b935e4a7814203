"""Grammar: the edit of a row whose output follows a grammar.

Legend: S sampling rows, R of them with a grammar, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .grammars import Grammars, Matcher
from .logit_edit import EditedRow, EditedRows, Ids, LogitEdit, RowStart, keep_only


class Masks(NamedTuple):
    """What the grammars of a step's rows leave to be sampled. Good until the next ones are computed."""

    words: NDArray[np.int32]  # [R, W]
    addresses: Ids  # [S] of a row's mask; 0 without one, where it has failed, and where only the end is left
    places: list[int]  # [R] among the S
    ended: list[int]  # of the S, where only the end is left
    eos_token_ids: list[int]

    def apply(self, logits: Tensor) -> None:
        """Leave nothing else in `logits` [S, V]."""
        self.apply_ends(logits)
        places = np.array(self.places, dtype=np.int64)
        is_masked = self.addresses[places] != 0
        if is_masked.any():
            keep_only(logits, self.words[is_masked], places[is_masked])

    def apply_ends(self, logits: Tensor) -> None:
        """The part of `apply` for rows without a mask: the rest is for a sampler that takes addresses."""
        for place in self.ended:
            logits[place].fill_(-torch.inf)
            logits[place, self.eos_token_ids[0]] = 0.0


class Grammar(LogitEdit["Grammar"]):
    """Allows what the row's grammar can go on with, and the end of sequence where the output may end.

    It comes last: whatever other edits do, nothing can be sampled that the grammar refuses. Where it leaves
    only the end of sequence the row ends, whatever forbids that (min_tokens, ignore_eos, allowed_token_ids).
    """

    needs_history = True

    def __init__(self, start: RowStart, grammars: Grammars) -> None:
        params = start.request.sampling_params
        self._grammars, self._text = grammars, start.request.grammar
        self._matcher: Matcher | None = None  # made when the row samples first: the device works by then
        self._num_consumed = 0  # of the output
        self._min_output = sys.maxsize if params.ignore_eos else params.min_tokens

    @classmethod
    def make(cls, start: RowStart) -> Self | None:
        if not start.request.grammar:
            return None
        assert start.grammars is not None
        return cls(start, start.grammars)

    @classmethod
    def apply(cls, logits: Tensor, rows: EditedRows[Grammar]) -> None:
        cls.compute_masks(rows, len(logits)).apply(logits)

    @classmethod
    def compute_masks(cls, rows: EditedRows[Grammar], num_rows: int) -> Masks:
        """What `apply` applies to `num_rows` rows, S. Matchers go on with the tokens that are new."""
        grammars = rows[0][1]._grammars
        token_ids = [edit._catch_up(row) for row, edit in rows]
        matchers = [edit._matcher for _, edit in rows if edit._matcher is not None]
        words = grammars.compute_masks(matchers, token_ids)
        places = [row.index for row, _ in rows]
        addresses = np.zeros(num_rows, dtype=np.int64)
        addresses[places] = words.ctypes.data + words.strides[0] * np.arange(len(rows))
        for (row, _), matcher in zip(rows, matchers, strict=True):
            row.work_us += matcher.take_work_us()
            if matcher.failure:
                row.failure = matcher.failure
                addresses[row.index] = 0
        ended: list[int] = []
        for number in np.flatnonzero(grammars.find_ends(words)).tolist():
            (row, edit), matcher = rows[number], matchers[number]
            is_early = row.num_output < edit._min_output or not matcher.is_accepting
            if not row.failure and grammars.must_end(words[number], is_early):
                addresses[row.index] = 0
                ended.append(row.index)
        return Masks(words, addresses, places, ended, grammars.eos_token_ids)

    def _catch_up(self, row: EditedRow) -> int | None:
        """The token that the matcher, which is there now, has still to consume, if it is one."""
        num_new = row.num_output - self._num_consumed
        self._num_consumed = row.num_output
        if num_new == 1 and self._matcher is not None:
            return int(row.token_ids[row.num_known - 1])
        token_ids = row.token_ids[row.num_known - num_new : row.num_known].tolist()
        if self._matcher is None:
            self._matcher = self._grammars.make_matcher(self._text, token_ids)
        elif token_ids:
            self._matcher.consume_all(token_ids)
        return None
