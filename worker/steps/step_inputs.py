"""From a SchedulerOutput to the model's inputs: one vectorized path for prefill, chunks and decode.

It reads rows and block tables and changes neither; everything here is numpy on the host.
Legend: T tokens and R requests of the step, S requests that sample, W blocks of the widest table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.protocol.step import SchedulerOutput
from ..attention.metadata import AttentionMetadata, make_metadata
from .block_tables import BlockTables
from .request_rows import RequestRows
from .staging import send_together

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(slots=True)
class StepInputs:
    """One step on the host. Requests are in the order of SchedulerOutput.rows, tokens grouped by request."""

    rows: Int64s  # [R]
    num_tokens: Int64s  # [R]
    token_rows: Int64s  # [T]
    input_ids: Int64s  # [T]
    positions: Int64s  # [T]
    slot_mapping: Int64s  # [G, T] of G KV groups
    query_starts: Int32s  # [R + 1]
    seq_lens: Int32s  # [R]
    block_tables: Int32s  # [G, R, W]
    sampling: Int64s  # [S] which of the R requests sample
    last_tokens: Int64s  # [S] index among the T tokens of each one's last
    rope_lengths: Int64s | None  # [T], with dynamic rope scaling

    def send(self, device: torch.device, pending: Int64s) -> DeviceInputs:
        """All that the model needs, in one copy. The ids of the tokens `pending` are on the device only."""
        arrays: list[NDArray[Any]] = [
            *(self.input_ids, self.positions, self.query_starts, self.seq_lens, self.block_tables),
            *(self.slot_mapping, self.last_tokens, self.rows[self.sampling]),
            *(pending, self.token_rows[pending]),
        ]
        if self.rope_lengths is not None:
            arrays.append(self.rope_lengths)
        ids, positions, starts, lengths, tables, slots, last_tokens, rows, *others = send_together(
            arrays, device
        )
        metadata = make_metadata(
            tables,
            slots,
            query_starts=starts,
            seq_lens=lengths,
            max_query_len=int(self.num_tokens.max()),
            max_seq_len=int(self.seq_lens.max()),
            query_starts_host=self.query_starts,
            seq_lens_host=self.seq_lens,
            block_tables_host=self.block_tables,
        )
        rope_lengths = None if self.rope_lengths is None else others[2]
        return DeviceInputs(ids, positions, rope_lengths, metadata, last_tokens, rows, others[0], others[1])

    def send_sampling(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`last_tokens` and the rows that sample, for a step whose other inputs are there."""
        last_tokens, rows = send_together((self.last_tokens, self.rows[self.sampling]), device)
        return last_tokens, rows


@dataclass(slots=True)
class DeviceInputs:
    """One step on the device."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    rope_lengths: Tensor | None  # int64 [T], with dynamic rope scaling
    metadata: AttentionMetadata
    last_tokens: Tensor  # int64 [S]
    sampling_rows: Tensor  # int64 [S]
    pending: Tensor  # int64 [P] which of the T tokens are in `last_tokens` of the runner
    pending_rows: Tensor  # int64 [P] at these places of it


def find_sampling(step: SchedulerOutput) -> Int64s:
    """Which of the R requests sample, [S]."""
    if step.sampled_rows is None:
        return np.arange(len(step.rows))
    if not step.sampled_rows:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(np.isin(step.rows, step.sampled_rows))


def build_step_inputs(
    step: SchedulerOutput, rows: RequestRows, tables: BlockTables, has_dynamic_rope: bool = False
) -> StepInputs:
    """Gather the inputs of `step`; its frees, entries and new blocks have been applied."""
    row_ids = np.array(step.rows, dtype=np.int64)
    num_tokens = np.array(step.num_tokens, dtype=np.int64)
    computed = rows.num_computed[row_ids]
    ends = np.cumsum(num_tokens)
    starts = ends - num_tokens
    seq_lens = computed + num_tokens
    assert (seq_lens <= rows.num_known[row_ids]).all(), "the core scheduled tokens that are not known"

    token_rows = np.repeat(row_ids, num_tokens)
    positions = np.arange(len(token_rows)) + np.repeat(computed - starts, num_tokens)
    sampling = find_sampling(step)
    return StepInputs(
        rows=row_ids,
        num_tokens=num_tokens,
        token_rows=token_rows,
        input_ids=rows.token_ids[token_rows, positions].astype(np.int64),
        positions=positions,
        slot_mapping=tables.slots(token_rows, positions),
        query_starts=np.concatenate(([0], ends)).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=tables.gather(row_ids, computed, int(seq_lens.max())),
        sampling=sampling,
        last_tokens=ends[sampling] - 1,
        rope_lengths=np.maximum(rows.num_prompt[token_rows], positions + 1) if has_dynamic_rope else None,
    )


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
