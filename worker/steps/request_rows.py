"""RequestRows: one permanent row of host state per live request, columns as numpy arrays.

Written by the runner alone: requests enter, steps advance the counts, sampled tokens are filled in. Plain
parameters are columns, so a step gathers them in one go; what few requests ask for is an object per row.
Legend: N rows (max_num_seqs), L max_model_len.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ipc.params.pooling_params import PoolingParams
from ...ipc.params.sampling_params import count_alternatives
from ...ipc.protocol.step import NewRequestData
from ...ipc.protocol.token_ids import count_token_ids
from ..sampling.grammars import Grammars
from ..sampling.logit_edit import EditedRow, LogitEdit, RowStart
from ..sampling.logit_edits import make_logit_edits
from ..sampling.logits_processor import LogitsProcessor
from ..sampling.sampler import LogprobGroup, SamplingBatch, make_sampling_columns

# A row whose last token filled max_model_len may be computed some steps longer before the core hears of it.
_SLACK = 8


class RequestRows:
    """State of the live requests. `num_known` counts prompt and output, samples of running steps included."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        *,
        grammars: Grammars | None = None,
        processors: Sequence[type[LogitsProcessor]] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._grammars = grammars  # needed by requests with one
        self._processors = processors
        # calloc'ed: pages that no token has reached cost nothing.
        self.token_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + _SLACK), dtype=np.int32)
        self._token_rows: list[NDArray[np.int32]] = list(self.token_ids)  # a view each: steps make none
        self.num_prompt: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_known: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        # Another number for each request of the row: tokens sampled for an earlier one are dropped.
        self.generation: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)
        # The launch (1, 2, ...) whose sampled token is not on the host yet; 0 if all are.
        self.pending_launch: NDArray[np.int64] = np.zeros(max_num_seqs, dtype=np.int64)

        self.sampling = make_sampling_columns(max_num_seqs)
        # num_logprobs, num_prompt_logprobs: alternatives wanted, None for no logprobs.
        self.num_logprobs: list[int | None] = [None] * max_num_seqs
        self.num_prompt_logprobs: list[int | None] = [None] * max_num_seqs
        # logprob_token_ids: in place of the likeliest tokens. None: not asked for.
        self.logprob_token_ids: list[NDArray[np.int64] | None] = [None] * max_num_seqs
        self.edits: list[list[LogitEdit[Any]]] = [[] for _ in range(max_num_seqs)]
        self.has_logprobs: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        # Until the last of its prompt's tokens is scored.
        self.has_prompt_logprobs: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.has_edits: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self.needs_history: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)
        self._has_appends: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)  # an edit takes tokens
        self.with_grammar: set[int] = set()  # rows
        self._entry_us: dict[int, int] = {}  # of rows with edits: processor time to make them, not noted yet
        # Rows that are pooled, and what of; type_start: from there on a row's tokens are of type 1, or None.
        self.pooling: dict[int, PoolingParams] = {}
        self.type_starts: dict[int, int] = {}
        # The most likely token and nothing else: no edits, no logprobs.
        self.is_greedy: NDArray[np.bool_] = np.zeros(max_num_seqs, dtype=np.bool_)

    def enter(self, request: NewRequestData) -> None:
        """Fill row `request.row` with a new or resumed request; whatever stood there is gone."""
        row = request.row
        prompt = np.frombuffer(request.prompt_token_ids, dtype=np.int32)
        output = np.frombuffer(request.output_token_ids, dtype=np.int32)
        num_known = len(prompt) + len(output)
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : num_known] = output
        self.num_prompt[row] = len(prompt)
        self.num_known[row] = num_known
        self.num_computed[row] = request.num_computed_tokens
        self.generation[row] += 1
        self.pending_launch[row] = 0
        if request.pooling_params is not None:
            self._enter_pooling(row, request, request.pooling_params)
            return
        self.sampling.enter(row, request.sampling_params, self._vocab_size)
        # A request with output has had the logprobs of its prompt delivered before its first token.
        self._enter_logprobs(row, request, is_resumed=len(output) > 0)
        start = RowStart(request, prompt, output, self._vocab_size, self._grammars, self._processors)
        began = time.thread_time_ns()
        self._enter_edits(row, make_logit_edits(start))
        if self.has_edits[row]:
            self._entry_us[row] = (time.thread_time_ns() - began) // 1000
        if request.grammar:
            self.with_grammar.add(row)
        is_plain = not (self.has_edits[row] or self.has_logprobs[row])
        self.is_greedy[row] = is_plain and request.sampling_params.temperature == 0

    def _enter_pooling(self, row: int, request: NewRequestData, params: PoolingParams) -> None:
        """Nothing is sampled in the row, so it has nothing of that; `free` has left it without edits."""
        self.has_prompt_logprobs[row] = False
        self.pooling[row] = params
        if request.type_start is not None:
            self.type_starts[row] = request.type_start

    def free(self, row: int) -> None:
        """Forget the request in `row`; the row may be entered again at once."""
        self.generation[row] += 1
        self.pending_launch[row] = 0
        if self.pooling.pop(row, None) is not None:
            self.type_starts.pop(row, None)
            return
        self._enter_edits(row, [])

    def append_sampled(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append one token to each of `rows`."""
        known = self.num_known[rows]
        self.token_ids[rows, known] = token_ids
        self.num_known[rows] = known + 1
        self._note_history(rows, token_ids)

    def fill_pending(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        generations: NDArray[np.int64],
        launch: int,
    ) -> None:
        """Fill in tokens that `num_known` counts already, sampled by `launch` for the requests of then.

        Tokens of rows that have got another request since are dropped.
        """
        is_same = self.generation[rows] == generations
        rows, positions, token_ids = rows[is_same], positions[is_same], token_ids[is_same]
        self.token_ids[rows, positions] = token_ids
        self.pending_launch[rows[self.pending_launch[rows] == launch]] = 0
        self._note_history(rows, token_ids)

    def _note_history(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        places = np.flatnonzero(self._has_appends[rows])
        for row, token_id in zip(rows[places].tolist(), token_ids[places].tolist(), strict=True):
            for edit in self.edits[row]:
                edit.append(token_id)

    def history(self, row: int) -> NDArray[np.int32]:
        """Prompt and output tokens of `row`, a view."""
        return self.token_ids[row, : self.num_known[row]]

    def make_sampling_batch(self, row_ids: NDArray[np.int64]) -> SamplingBatch:
        """How `row_ids` are sampled next. History must be complete for rows that need it."""
        num_output = self.num_known[row_ids] - self.num_prompt[row_ids]
        batch = SamplingBatch(**self.sampling.take(row_ids), output_positions=num_output)
        edited = np.flatnonzero(self.has_edits[row_ids])
        rows = row_ids[edited]
        columns = (edited, rows, self.num_known[rows], num_output[edited])
        for index, row, known, count in zip(*(column.tolist() for column in columns), strict=True):
            work_us = self._entry_us.pop(row, 0)
            batch.edited.append(
                EditedRow(index, self.edits[row], self._token_rows[row], known, count, work_us)
            )
        batch.logprob_groups = self._group_logprobs(row_ids)
        return batch

    def _group_logprobs(self, row_ids: NDArray[np.int64]) -> list[LogprobGroup]:
        groups: dict[tuple[int, bool], LogprobGroup] = {}
        for index in np.flatnonzero(self.has_logprobs[row_ids]).tolist():
            row = int(row_ids[index])
            num_others, token_ids = self.num_logprobs[row], self.logprob_token_ids[row]
            assert num_others is not None
            group = groups.setdefault((num_others, token_ids is not None), LogprobGroup(num_others))
            group.rows.append(index)
            if token_ids is not None:
                group.token_ids.append(token_ids)
        return list(groups.values())

    def _enter_logprobs(self, row: int, request: NewRequestData, is_resumed: bool) -> None:
        params, packed = request.sampling_params, request.token_lists.logprobs
        self.num_logprobs[row] = count_alternatives(params.logprobs, self._vocab_size)
        self.logprob_token_ids[row] = None
        if packed:
            self.num_logprobs[row] = count_token_ids(packed)
            self.logprob_token_ids[row] = np.frombuffer(packed, dtype=np.int32).astype(np.int64)
        num_prompt = count_alternatives(params.prompt_logprobs, self._vocab_size)
        self.num_prompt_logprobs[row] = None if is_resumed else num_prompt
        self.has_logprobs[row] = self.num_logprobs[row] is not None
        self.has_prompt_logprobs[row] = self.num_prompt_logprobs[row] is not None

    def _enter_edits(self, row: int, edits: list[LogitEdit[Any]]) -> None:
        self.with_grammar.discard(row)
        self.edits[row] = edits
        self._entry_us.pop(row, None)
        self.has_edits[row] = bool(edits)
        self.needs_history[row] = any(edit.needs_history for edit in edits)
        self._has_appends[row] = any(
            edit.needs_history and type(edit).append is not LogitEdit.append for edit in edits
        )
