"""From a SchedulerOutput to the model's inputs: one vectorized path for prefill, chunks and decode.

It reads rows and block tables and changes neither; everything here is numpy on the host.
Legend: T tokens and R requests of the step, S requests that sample, W blocks of the widest table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...ipc.step import SchedulerOutput
from ..attention.metadata import AttentionMetadata
from .block_tables import BlockTables
from .request_rows import RequestRows
from .staging import to_device

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
    slot_mapping: Int64s  # [T]
    query_starts: Int32s  # [R + 1]
    seq_lens: Int32s  # [R]
    block_tables: Int32s  # [R, W]
    sampling: Int64s  # [S] which of the R requests sample
    last_tokens: Int64s  # [S] index among the T tokens of each one's last
    rope_lengths: Int64s | None  # [T], with dynamic rope scaling

    def to_metadata(self, device: torch.device) -> AttentionMetadata:
        """The attention's view of the step, on the device."""
        return AttentionMetadata(
            query_starts=to_device(self.query_starts, device),
            seq_lens=to_device(self.seq_lens, device),
            block_tables=to_device(self.block_tables, device),
            slot_mapping=to_device(self.slot_mapping, device),
            max_query_len=int(self.num_tokens.max()),
            max_seq_len=int(self.seq_lens.max()),
            query_starts_host=self.query_starts,
            seq_lens_host=self.seq_lens,
        )


def find_sampling(step: SchedulerOutput) -> Int64s:
    """Which of the R requests sample, [S]."""
    if step.sampled_rows is None:
        return np.arange(len(step.rows))
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
        block_tables=tables.gather(row_ids, int(seq_lens.max())),
        sampling=sampling,
        last_tokens=ends[sampling] - 1,
        rope_lengths=np.maximum(rows.num_prompt[token_rows], positions + 1) if has_dynamic_rope else None,
    )
