"""CUDA graphs for steps: hundreds of launches become one.

Graphs are captured when the worker starts. A step is padded to the next size that has one, as
`AttentionMetadata` says; lengths are read on the device. Steps larger than any graph run without. It knows
how to capture, fill and replay, not what the model computes.
Legend: T tokens of a graph, R requests of a step.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.errors import CaptureError
from ...ipc.spec.config import EngineConfig
from ...ipc.spec.model_spec import has_dynamic_rope
from ..attention.metadata import HostStep, KVCaches, make_metadata
from ..models.model import Model
from .staging import StagingRing
from .step_inputs import StepInputs

# Requests of one token: 1, 2, 4, then so far apart. Beyond 512 (vLLM's largest) the device's work hides the
# launches of a large model, not those of a small one.
_STEPS = ((8, 256, 8), (256, 512, 16), (512, 1024, 64))
# Tokens of mixed steps and prefills. Larger steps take the device longer than the host needs to launch them.
_MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Requests of a mixed step: splits of the keys follow from the bound, so there is one for a few.
_MIXED_REQUESTS = (8, 64)


@dataclass(frozen=True, slots=True)
class GraphSize:
    """What a graph has room for."""

    num_tokens: int
    num_requests: int
    is_mixed: bool  # some request may have more than one token


def make_ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, rising up to `max_num_seqs`."""
    sizes = [1, 2, 4, *(size for step in _STEPS for size in range(*step))]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class GraphSizes:
    """All sizes of an engine, and the choice of one. It knows numbers, no tensors.

    A step of single tokens is computed by a graph of requests, any other by a graph of tokens that has room
    for so many requests. A graph's work is bounded on the device, so what is padded costs launches of empty
    programs and the matrix products of the tokens in excess.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, *, captures_chunks: bool) -> None:
        """Without `captures_chunks` there are graphs for steps of single tokens only."""
        self._singles = make_ladder(max_num_seqs)
        tokens = [size for size in _MIXED_TOKENS if size < max_num_batched_tokens]
        if max_num_batched_tokens <= _MIXED_TOKENS[-1]:
            tokens.append(max_num_batched_tokens)
        self._tokens = tokens if captures_chunks else []
        self._requests = [*(count for count in _MIXED_REQUESTS if count < max_num_seqs), max_num_seqs]

    @property
    def all(self) -> list[GraphSize]:
        """Largest first: the others then fit into the memory that it has taken."""
        singles = [GraphSize(size, size, is_mixed=False) for size in self._singles]
        mixed = [
            GraphSize(size, count, is_mixed=True)
            for size in self._tokens
            for count in dict.fromkeys(min(count, size) for count in self._requests)
        ]
        return sorted(singles + mixed, key=lambda size: (size.num_tokens, size.num_requests), reverse=True)

    def choose(self, num_tokens: int, num_requests: int) -> GraphSize | None:
        """The smallest that holds such a step; None if none does."""
        if num_tokens == num_requests:
            size = _least(self._singles, num_requests)
            return None if size is None else GraphSize(size, size, is_mixed=False)
        size, count = _least(self._tokens, num_tokens), _least(self._requests, num_requests)
        if size is None or count is None:
            return None
        return GraphSize(size, min(count, size), is_mixed=True)


def _least(rising: list[int], number: int) -> int | None:
    place = bisect_left(rising, number)
    return rising[place] if place < len(rising) else None


Replay = Callable[[], None]


class Capture(Protocol):
    """Captures a computation on fixed tensors: (a function that runs it again, its result)."""

    def __call__(self, compute: Callable[[], Tensor], /) -> tuple[Replay, Tensor]: ...


@contextmanager
def capture_on_cuda(device: torch.device) -> Generator[Capture]:
    """Gives a Capture for all graphs of a worker, which share one memory pool: they replay one by one.

    A capture that fails leaves its stream, and torch's allocator, in a state that nothing brings them out of:
    CaptureError, and the worker's process ends.

    The device is waited for, and its free memory given back, once for all of them. A computation runs as it
    is before it is captured: what is compiled, loaded or allocated at a first call is there by then.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        try:
            compute()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            # The end of a capture that has failed fails too; the first error is the reason.
            raise CaptureError(error.__context__ or error) from error
        return graph.replay, result

    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    was_enabled = gc.isenabled()
    gc.disable()  # what it frees of the device would be part of a capture
    try:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield capture
        torch.cuda.current_stream(device).wait_stream(stream)
    finally:
        if was_enabled:
            gc.enable()


_log = logging.getLogger(__name__)

# Steps in flight are at most two; a third buffer can be filled while both are read.
_NUM_STAGING_BUFFERS = 3
# Rows of a graph's input matrix, int64 [6 + G, T] with G KV groups, which travels to the device in one copy.
# Lengths and starts are int32 numbers of requests, of which there are no more than tokens. Slots are last.
_INPUT_IDS, _PENDING_ROWS, _POSITIONS, _ROPE_LENGTHS, _SEQ_LENS, _QUERY_STARTS, _SLOTS = range(7)
_PROGRESS_INTERVAL_S = 2.0


class StepGraphs:
    """Runs the model on steps; `last_tokens` [max_num_seqs] holds the newest token of each row."""

    def __init__(self, config: EngineConfig, model: Model, kv_caches: KVCaches, last_tokens: Tensor) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._backends, self._block_size = model.attention_backends, config.cache.block_size
        self._last_tokens = last_tokens
        self._has_dynamic_rope = has_dynamic_rope(config.model.spec)
        self._max_seq_len = config.model.max_model_len
        scheduler = config.scheduler
        self._sizes = GraphSizes(
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens, captures_chunks=model.captures_chunks
        )
        self._graphs: dict[GraphSize, tuple[Replay, Tensor]] = {}
        device, max_num_seqs = last_tokens.device, scheduler.max_num_seqs
        # One block more than the longest request has: with run-ahead, a row that has ended in the step before
        # is still computed in this one.
        width = config.max_blocks_per_sequence + 1
        num_groups = len(config.model.spec.kv_windows)
        self._num_inputs = _SLOTS + num_groups  # the slots of each KV group are the last
        num_inputs = self._num_inputs * self._sizes.all[0].num_tokens
        self._inputs = torch.zeros(num_inputs, dtype=torch.int64, device=device)
        self._tables = torch.zeros((num_groups, max_num_seqs + 1, width), dtype=torch.int32, device=device)
        self._single_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._input_ring = StagingRing(num_inputs, torch.int64, device, _NUM_STAGING_BUFFERS)
        self._table_ring = StagingRing(
            num_groups * max_num_seqs * width, torch.int32, device, _NUM_STAGING_BUFFERS
        )

    def capture(self, capture: Capture) -> None:
        """Capture a graph of each size. Raises CaptureError; nothing of this object can be used then."""
        started = said_at = time.monotonic()
        sizes = self._sizes.all
        for size in sizes:
            self._clear(size)
            self._graphs[size] = capture(self._make_computation(size))
            if time.monotonic() >= said_at + _PROGRESS_INTERVAL_S:
                said_at = time.monotonic()
                _log.info("captured %d of %d CUDA graphs", len(self._graphs), len(sizes))
        _log.info("captured %d CUDA graphs in %.1f s", len(sizes), time.monotonic() - started)

    def choose(self, inputs: StepInputs) -> GraphSize | None:
        """The graph for a step, None if it has none."""
        size = self._sizes.choose(len(inputs.token_rows), len(inputs.rows))
        return size if size in self._graphs else None

    def run(self, size: GraphSize, inputs: StepInputs, pending: NDArray[np.int64]) -> Tensor:
        """Hidden states of the step's tokens, valid until the next call. `size` is as `choose` says.

        The ids of the tokens `pending` are on the device only.
        """
        self._fill(size, inputs, pending)
        steps = [HostStep(inputs.query_starts, inputs.seq_lens, tables) for tables in inputs.block_tables]
        for backend in self._backends:
            count = size.num_requests + size.is_mixed
            backend.prepare_replay(size.num_tokens, count, steps, self._block_size)
        replay, hidden = self._graphs[size]
        replay()
        return hidden[: len(inputs.token_rows)]

    def _view(self, size: GraphSize) -> Tensor:
        """The graph's inputs, int64 [6 + G, T] with G KV groups."""
        return self._inputs[: self._num_inputs * size.num_tokens].view(self._num_inputs, size.num_tokens)

    def _clear(self, size: GraphSize) -> None:
        """Inputs of nothing but padding, so that nothing is written to the cache."""
        inputs = self._view(size)
        inputs.zero_()
        inputs[_PENDING_ROWS] = inputs[_SLOTS:] = -1
        inputs[_QUERY_STARTS].view(torch.int32)[1:] = size.num_tokens

    def _fill(self, size: GraphSize, inputs: StepInputs, pending: NDArray[np.int64]) -> None:
        num_tokens, num_requests = len(inputs.token_rows), len(inputs.rows)
        staged = self._input_ring.take(self._num_inputs, size.num_tokens)
        staged[:, num_tokens:] = 0
        staged[_PENDING_ROWS] = -1
        staged[_SLOTS:, num_tokens:] = -1
        staged[_INPUT_IDS, :num_tokens] = inputs.input_ids
        staged[_PENDING_ROWS, pending] = inputs.token_rows[pending]
        staged[_POSITIONS, :num_tokens] = inputs.positions
        staged[_SLOTS:, :num_tokens] = inputs.slot_mapping
        if inputs.rope_lengths is not None:
            staged[_ROPE_LENGTHS, :num_tokens] = inputs.rope_lengths
        lengths, starts = staged[_SEQ_LENS].view(np.int32), staged[_QUERY_STARTS].view(np.int32)
        lengths[:num_requests], lengths[num_requests:] = inputs.seq_lens, 0
        starts[: num_requests + 1], starts[num_requests + 1 :] = inputs.query_starts, size.num_tokens
        self._input_ring.send(self._view(size))
        self._table_ring.take(*inputs.block_tables.shape)[:] = inputs.block_tables
        self._table_ring.send(self._tables[:, :num_requests, : inputs.block_tables.shape[2]])

    def _make_computation(self, size: GraphSize) -> Callable[[], Tensor]:
        """The model on the fixed inputs: hidden states [T, hidden]."""
        inputs, count = self._view(size), size.num_requests + size.is_mixed  # one has the padding tokens
        starts = inputs[_QUERY_STARTS].view(torch.int32) if size.is_mixed else self._single_starts

        def compute() -> Tensor:
            pending_rows = inputs[_PENDING_ROWS]
            pending_tokens = self._last_tokens.index_select(0, pending_rows.clamp(min=0))
            metadata = make_metadata(
                self._tables[:, :count],
                inputs[_SLOTS:],
                query_starts=starts[: count + 1],
                seq_lens=inputs[_SEQ_LENS].view(torch.int32)[:count],
                max_query_len=size.num_tokens if size.is_mixed else 1,
                max_seq_len=self._max_seq_len,
                kind_bounds=(count, count if size.is_mixed else 0),
            )
            return self._model.forward(
                torch.where(pending_rows >= 0, pending_tokens, inputs[_INPUT_IDS]),
                inputs[_POSITIONS],
                self._kv_caches,
                metadata,
                inputs[_ROPE_LENGTHS] if self._has_dynamic_rope else None,
            )

        return compute


def make_step_graphs(
    config: EngineConfig, model: Model, kv_caches: KVCaches, last_tokens: Tensor
) -> StepGraphs | None:
    """The device's graphs, yet to be captured; None where `can_capture` says no."""
    if not can_capture(config, model, last_tokens.device):
        return None
    return StepGraphs(config, model, kv_caches, last_tokens)


def can_capture(config: EngineConfig, model: Model, device: torch.device) -> bool:
    """Whether there are graphs at all.

    Not on a CPU, under `enforce_eager`, for an encoder, for a model that reads lengths on the host, and for
    one with recurrent layers, whose slots no graph has an input for.
    """
    if device.type != "cuda" or config.model.enforce_eager:
        return False
    spec = config.model.spec
    return spec.is_causal and not spec.state_size and model.is_capturable
