"""CUDA graphs for steps in which every request has one token: hundreds of launches become one.

A graph is captured for each size of a ladder when its size comes up the second time (the first such step
runs as it is, which compiles what is missing), so the first tokens wait for no graph. A step is padded to
the next size; padding rows read nothing and write nothing (`AttentionMetadata`). Everything else, prompts
above all, runs without graphs. It knows how to fill and replay, not what the model computes.
Legend: B rows of a graph, R requests of a step, W blocks of a table.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..ipc.config import EngineConfig
from .attention.metadata import AttentionMetadata, KVCaches
from .models.decoder import Decoder
from .rows.staging import StagingRing
from .rows.step_inputs import StepInputs

_log = logging.getLogger(__name__)

# Steps in flight are at most two; a third buffer can be filled while both are read.
_NUM_STAGING_BUFFERS = 3
# Rows of the input matrix, int64 [6, max B], which travels to the device in one copy.
_NUM_INPUTS = 6
_INPUT_IDS, _PENDING_ROWS, _POSITIONS, _ROPE_LENGTHS, _SLOTS, _SEQ_LENS = range(_NUM_INPUTS)

# Captures a computation on fixed tensors; what comes back is (a function that runs it again, its result).
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


def make_ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, rising up to `max_num_seqs`: 1, 2, 4, then in steps of 8, later 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def choose_size(ladder: list[int], num_requests: int) -> int:
    """The smallest size that holds so many requests."""
    return ladder[bisect_left(ladder, num_requests)]


class DecodeGraphs:
    """Runs the model on steps of single tokens; `last_tokens` [max_num_seqs] holds the newest of each row."""

    def __init__(
        self, config: EngineConfig, model: Decoder, kv_caches: KVCaches, last_tokens: Tensor, capture: Capture
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._last_tokens = last_tokens
        self._capture = capture
        self._has_dynamic_rope = config.model.spec.rope.type == "dynamic"
        self._max_seq_len = config.model.max_model_len
        self._ladder = make_ladder(config.scheduler.max_num_seqs)
        self._seen: set[int] = set()
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        self._is_off = False
        device, max_size = last_tokens.device, self._ladder[-1]
        # One block more than the longest request has: with run-ahead, a row that has ended in the step before
        # is still computed in this one.
        width = config.max_blocks_per_request + 1
        self._inputs = torch.zeros((_NUM_INPUTS, max_size), dtype=torch.int64, device=device)
        self._tables = torch.zeros((max_size, width), dtype=torch.int32, device=device)
        self._query_starts = torch.arange(max_size + 1, dtype=torch.int32, device=device)
        self._input_ring = StagingRing(_NUM_INPUTS * max_size, torch.int64, device, _NUM_STAGING_BUFFERS)
        self._table_ring = StagingRing(max_size * width, torch.int32, device, _NUM_STAGING_BUFFERS)

    def covers(self, inputs: StepInputs) -> bool:
        """Whether the step is one for `run`."""
        return not self._is_off and len(inputs.token_rows) == len(inputs.rows)

    def run(self, inputs: StepInputs, pending: NDArray[np.int64]) -> Tensor:
        """Hidden states [R, hidden], valid until the next call. `pending` tokens are on the device only."""
        num_requests = len(inputs.rows)
        size = choose_size(self._ladder, num_requests)
        self._fill(inputs, pending)
        return self._compute_or_replay(size)[:num_requests]

    def _fill(self, inputs: StepInputs, pending: NDArray[np.int64]) -> None:
        num_requests = len(inputs.rows)
        staged = self._input_ring.take(*self._inputs.shape)
        staged[:] = 0
        staged[_PENDING_ROWS] = -1
        staged[_SLOTS] = -1
        staged[_INPUT_IDS, :num_requests] = inputs.input_ids
        staged[_PENDING_ROWS, pending] = inputs.rows[pending]
        staged[_POSITIONS, :num_requests] = inputs.positions
        staged[_SLOTS, :num_requests] = inputs.slot_mapping
        staged[_SEQ_LENS].view(np.int32)[:num_requests] = inputs.seq_lens
        if inputs.rope_lengths is not None:
            staged[_ROPE_LENGTHS, :num_requests] = inputs.rope_lengths
        self._input_ring.send(self._inputs)
        self._table_ring.take(*inputs.block_tables.shape)[:] = inputs.block_tables
        self._table_ring.send(self._tables[:num_requests, : inputs.block_tables.shape[1]])

    def _compute_or_replay(self, size: int) -> Tensor:
        """Hidden states [B, hidden] of what `_fill` put in place."""
        if size not in self._graphs:
            if size not in self._seen:
                self._seen.add(size)
                return self._compute(size)
            try:
                self._graphs[size] = self._capture(lambda: self._compute(size))
            except RuntimeError as error:
                _log.warning("CUDA graphs are off, steps run without: capture of %d rows: %s", size, error)
                self._is_off = True
                return self._compute(size)
        replay, hidden = self._graphs[size]
        replay()
        return hidden

    def _compute(self, size: int) -> Tensor:
        """The model on the first `size` rows of the fixed inputs."""
        inputs = self._inputs[:, :size]
        pending_rows = inputs[_PENDING_ROWS]
        pending_tokens = self._last_tokens.index_select(0, pending_rows.clamp(min=0))
        metadata = AttentionMetadata(
            query_starts=self._query_starts[: size + 1],
            seq_lens=self._inputs[_SEQ_LENS].view(torch.int32)[:size],
            block_tables=self._tables[:size],
            slot_mapping=inputs[_SLOTS],
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
        return self._model.forward(
            torch.where(pending_rows >= 0, pending_tokens, inputs[_INPUT_IDS]),
            inputs[_POSITIONS],
            self._kv_caches,
            metadata,
            inputs[_ROPE_LENGTHS] if self._has_dynamic_rope else None,
        )


def make_decode_graphs(
    config: EngineConfig, model: Decoder, kv_caches: KVCaches, last_tokens: Tensor
) -> DecodeGraphs | None:
    """The device's graphs, None where `can_capture` says no."""
    if not can_capture(config, model, last_tokens.device):
        return None
    return DecodeGraphs(config, model, kv_caches, last_tokens, make_cuda_capture())


def can_capture(config: EngineConfig, model: Decoder, device: torch.device) -> bool:
    """False on a CPU, under `enforce_eager`, and for a model whose attention reads lengths on the host."""
    return device.type == "cuda" and not config.model.enforce_eager and model.is_capturable


def make_cuda_capture() -> Capture:
    """Captures whose graphs share one memory pool; they are replayed one after the other."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = compute()
        return graph.replay, result

    return capture
