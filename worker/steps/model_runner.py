"""GPUModelRunner: executes steps on one device, a CPU or a GPU with the same code.

It keeps rows and block tables as the steps say, runs the model and the sampler, and packs the answer. It
decides nothing: which rows compute how much is the core's, weights and memory the Worker's. `launch` queues
a step's work on the device and `collect` waits for its tokens; a step may be launched before the one ahead of
it is collected, its inputs then come from the tokens that are still on the device.
Legend: T tokens, R requests, S sampling requests of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.processes.fault_hooks import make_fault_hooks
from ...ipc.protocol.messages import LogprobsBlock
from ...ipc.protocol.step import (
    MIN_ROW_WORK_US,
    ModelRunnerOutput,
    RowFailure,
    RowLogprobs,
    RowWork,
    SchedulerOutput,
)
from ...ipc.spec.config import EngineConfig
from ...ipc.spec.model_spec import has_dynamic_rope
from ...kernels.choice import choose_kernel, native_library
from ...kernels.sampling.argmax import launch_argmax
from ..attention.metadata import KVCaches
from ..kv_cache import copy_blocks, find_table_groups
from ..models.model import Model
from ..pooling.pooler import LaunchedVectors, PooledRows, Pooler, find_pooled_rows
from ..sampling.grammars import Grammars
from ..sampling.logits_processor import LogitsProcessor
from ..sampling.logprobs import (
    LogprobsTensors,
    compute_logprobs,
    join_logprobs,
    pack_logprobs,
    pack_positions,
)
from ..sampling.sampler import SampledTokens, SamplingBatch, sample
from .block_tables import BlockTables
from .cuda_graphs import capture_on_cuda, make_step_graphs
from .native_steps import NativeSteps
from .request_rows import RequestRows
from .row_states import RowStates
from .side_thread import SideJob, SideThread
from .staging import HostCopies, to_device
from .step_inputs import StepInputs, build_step_inputs, find_sampling, find_types

Int64s = NDArray[np.int64]

# Prompt logits are computed in slices of at most this many numbers (32 MB), whatever the prompt's length.
_PROMPT_LOGITS_ELEMENTS = 1 << 23
# A row can be computed a step longer than its request lives: one token may need one block more.
_SLACK_BLOCKS = 1


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Where a step's tokens go once they are on the host."""

    launch: int  # of this runner's launches, from 1
    positions: Int64s  # [S] in their rows
    generations: Int64s  # [S] of the rows at launch; the token of a row that has a new one is dropped


@dataclass(slots=True)
class LaunchedStep:
    """A step whose results are on their way to the host."""

    step_id: int
    rows: Int64s  # [S]
    pending: PendingTokens | None  # None once the tokens are in their rows
    copies: HostCopies  # token ids, is_bad, then three tensors for each entry of the two lists below
    sample_groups: list[list[int]]  # logprobs of these among the S
    prompt_rows: list[int]  # rows with prompt logprobs
    failed_rows: list[RowFailure]
    execute_s: float
    row_work: list[RowWork] = field(default_factory=list[RowWork])
    vectors: LaunchedVectors | None = None

    @property
    def is_done(self) -> bool:
        """Whether the device has computed its tokens, so that `collect` need not wait for them."""
        return self.copies.are_there


@dataclass(slots=True)
class ComputedStep:
    """What the model has made of a step, on the device."""

    hidden: Tensor  # [T, hidden]
    logits: Tensor  # [S, vocab]
    # (row, logprobs of the prompt tokens that follow the ones computed in this step)
    prompt_logprobs: list[tuple[int, LogprobsTensors]] = field(
        default_factory=list[tuple[int, LogprobsTensors]]
    )
    sampling_rows: Tensor | None = None  # int64 [S]; None where steps are not launched ahead


class GPUModelRunner:
    """Executes SchedulerOutputs in order. `is_async` leaves reading tokens to `collect` (on a GPU)."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        kv_caches: KVCaches,
        device: torch.device,
        is_async: bool | None = None,
        states: Tensor | None = None,
    ) -> None:
        """`states`: float32 [slots, slot_numbers] of a model with recurrent layers."""
        self._config = config
        self._model = model
        self._kv_caches, self._slots = kv_caches, states
        self._device = device
        self.is_async = device.type != "cpu" if is_async is None else is_async
        self._table_groups = find_table_groups(config, kv_caches)
        self._lays_out = not config.model.spec.is_causal
        self._has_dynamic_rope = has_dynamic_rope(config.model.spec)
        self._faults = make_fault_hooks(config.fault_hooks, "worker")
        has_argmax = choose_kernel("argmax", torch.float32, device) == "native"
        self._library = native_library() if has_argmax else None
        self._num_launches = 0
        self._in_flight: deque[LaunchedStep] = deque()
        max_num_seqs = config.scheduler.max_num_seqs
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._processors: Sequence[type[LogitsProcessor]] = ()
        self._graphs = make_step_graphs(config, model, kv_caches, self._last_tokens)
        self._grammars = Grammars(config.model)
        self._pooler = _make_pooler(config, model, device)
        self._side_thread = SideThread()
        self._prepared: SideJob[SamplingBatch] | None = None  # of a step that has been launched
        self.reset_rows()

    def use_logits_processors(self, processors: Sequence[type[LogitsProcessor]]) -> None:
        """Have them edit the logits of every request that comes; forgets those that are here."""
        self._processors = processors
        self.reset_rows()

    def reset_rows(self) -> None:
        """Forget every request. The KV cache keeps its contents."""
        config = self._config
        max_num_seqs = config.scheduler.max_num_seqs
        self._in_flight.clear()
        if self._prepared is not None:
            self._prepared.drop()
            self._prepared = None
        vocab_size = config.model.spec.vocab_size
        self._rows = RequestRows(
            max_num_seqs,
            config.model.max_model_len,
            vocab_size,
            grammars=self._grammars,
            processors=self._processors,
        )
        self._tables = BlockTables(
            max_num_seqs,
            config.max_blocks_per_sequence + _SLACK_BLOCKS,
            config.cache.block_size,
            self._table_groups,
        )
        self._states = None if self._slots is None else RowStates(self._slots, max_num_seqs)
        self._native_steps = self._make_native_steps()

    def _make_native_steps(self) -> NativeSteps | None:
        """The short way through a step, None where the model has no native pass or the steps need more."""
        forward = self._model.native
        if forward is None or self.is_async or self._has_dynamic_rope:
            return None
        max_tokens = self._config.scheduler.max_num_batched_tokens
        return NativeSteps(forward, self._rows, self._tables, self._kv_caches, max_tokens, self._states)

    @property
    def has_graphs(self) -> bool:
        """Whether `capture_graphs` has something to do."""
        return self._graphs is not None

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Capture CUDA graphs for the steps that get one; no request may be there. Raises CaptureError."""
        if self._graphs is not None:
            with capture_on_cuda(self._device) as capture:
                self._graphs.capture(capture)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Launch a step and wait for its tokens."""
        return self.collect(self.launch(step))

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Apply the step's changes and queue its work; rows advance as if it were done."""
        started = time.perf_counter()
        self._apply_changes(step)
        row_ids, num_tokens = np.array(step.rows, dtype=np.int64), np.array(step.num_tokens, dtype=np.int64)
        sampling = find_sampling(step)
        sampling_rows = row_ids[sampling]
        self._prepare_beside(sampling_rows)
        if self._rows.pooling and not self._rows.pooling.keys().isdisjoint(step.rows):
            return self._launch_pooling(step, row_ids, num_tokens, sampling, started)
        if self._native_steps is not None and not self._rows.has_prompt_logprobs[row_ids].any():
            logits = self._native_steps.compute(row_ids, num_tokens, sampling)
            computed = ComputedStep(logits, logits)
        else:
            computed = self._compute(step)
        sampled = self._sample(sampling_rows, computed.logits)
        launched = self._advance(step.step_id, sampling_rows, sampled, computed)
        launched.execute_s = time.perf_counter() - started
        return launched

    def _launch_pooling(
        self, step: SchedulerOutput, row_ids: Int64s, num_tokens: Int64s, sampling: Int64s, started: float
    ) -> LaunchedStep:
        """As `launch`, of a step with rows that are pooled, whose changes have been applied."""
        rows = self._rows
        pooled = find_pooled_rows(step, num_tokens, rows.num_computed[row_ids], rows.pooling)
        if self._lays_out:
            self._tables.lay_out(row_ids, num_tokens)
        if self._native_steps is not None and not rows.has_prompt_logprobs[row_ids].any():
            hidden = self._native_steps.compute_hidden(row_ids, num_tokens, rows.type_starts)
            logits = hidden[:0]
            if len(sampling):
                last_tokens = np.cumsum(num_tokens)[sampling] - 1
                logits = self._model.compute_logits(hidden[to_device(last_tokens, self._device)])
            computed = ComputedStep(hidden, logits)
        else:
            computed = self._compute(step)
        hidden = computed.hidden
        if self._faults is not None and self._faults.reach("worker.vector"):
            hidden[0] = torch.nan
        vectors = self._pool(hidden, pooled)
        sampled = self._sample(row_ids[sampling], computed.logits)
        launched = self._advance(step.step_id, row_ids[sampling], sampled, computed)
        launched.vectors = vectors
        launched.execute_s = time.perf_counter() - started
        return launched

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Wait for a launched step and pack its answer."""
        started = time.perf_counter()
        self._commit_through(launched)
        token_ids, is_bad, *arrays = launched.copies.wait()
        pooled, bad_vectors = ([], []) if launched.vectors is None else launched.vectors.collect()
        return ModelRunnerOutput(
            step_id=launched.step_id,
            rows=launched.rows.tolist(),
            token_ids=token_ids.tolist(),
            logprobs=_pack_rows(launched, arrays) if arrays else [],
            bad_rows=launched.rows[is_bad].tolist() + bad_vectors,
            execute_s=launched.execute_s + time.perf_counter() - started,
            failed_rows=launched.failed_rows,
            pooled=pooled,
            row_work=launched.row_work,
        )

    def _apply_changes(self, step: SchedulerOutput) -> None:
        for row in step.freed_rows:
            self._rows.free(row)
        for request in step.new_requests:
            self._rows.enter(request)
            self._tables.assign(request.row, request.blocks)
        for row, group, block_ids in step.new_block_ids:
            self._tables.append(row, group, block_ids)
        if step.block_copies:
            scales = [group.scale for group in self._table_groups]
            copy_blocks(self._kv_caches, self._config.model.spec.layers, scales, step.block_copies)
        if self._states is not None:
            self._states.apply(step)

    def _compute(self, step: SchedulerOutput) -> ComputedStep:
        """Run the model on a step, and score the prompts that want it."""
        inputs = build_step_inputs(step, self._rows, self._tables, self._has_dynamic_rope)
        hidden, last_tokens, sampling_rows = self._forward(inputs)
        self._rows.num_computed[inputs.rows] = inputs.seq_lens
        logits = self._model.compute_logits(hidden[last_tokens]) if len(inputs.last_tokens) else hidden[:0]
        return ComputedStep(hidden, logits, self._score_prompts(inputs, hidden), sampling_rows)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [T, hidden]; on the device which of them sample [S], and their rows [S]."""
        device, pending = self._device, self._find_pending(inputs)
        size = None if self._graphs is None else self._graphs.choose(inputs)
        if self._graphs is not None and size is not None:
            hidden = self._graphs.run(size, inputs, pending)
            return hidden, *inputs.send_sampling(device)
        sent = inputs.send(device, pending)
        if len(pending):
            sent.input_ids[sent.pending] = self._last_tokens[sent.pending_rows]
        if self._states is not None:
            firsts = inputs.seq_lens - inputs.num_tokens
            sent.metadata.states = self._states.make(inputs.rows, inputs.num_tokens, firsts)
        hidden = self._model.forward(
            sent.input_ids,
            sent.positions,
            self._kv_caches,
            sent.metadata,
            sent.rope_lengths,
            self._find_types(inputs),
        )
        return hidden, sent.last_tokens, sent.sampling_rows

    def _find_types(self, inputs: StepInputs) -> Tensor | None:
        """int64 [T]; None if all are 0."""
        if not self._rows.type_starts:
            return None
        firsts = inputs.seq_lens - inputs.num_tokens
        types = find_types(inputs.rows, inputs.num_tokens, firsts, self._rows.type_starts)
        return None if types is None else to_device(types, self._device)

    def _find_pending(self, inputs: StepInputs) -> Int64s:
        """Which of the T tokens are not on the host yet."""
        if not self._in_flight:
            return np.empty(0, dtype=np.int64)
        rows, token_rows = self._rows, inputs.token_rows
        is_last = inputs.positions == rows.num_known[token_rows] - 1
        return np.flatnonzero(is_last & (rows.pending_launch[token_rows] > 0))

    def _score_prompts(self, inputs: StepInputs, hidden: Tensor) -> list[tuple[int, LogprobsTensors]]:
        """(row, logprobs of the prompt tokens that follow the ones computed in this step)."""
        scored: list[tuple[int, LogprobsTensors]] = []
        for request in np.flatnonzero(self._rows.has_prompt_logprobs[inputs.rows]).tolist():
            row = int(inputs.rows[request])
            start, end = inputs.query_starts[request : request + 2].tolist()
            first = int(inputs.positions[start]) + 1
            last = min(first + end - start, int(self._rows.num_prompt[row]))
            if first < last:
                targets = self._rows.token_ids[row, first:last].astype(np.int64)
                scored.append((row, self._score(row, hidden[start : start + last - first], targets)))
            self._rows.has_prompt_logprobs[row] = last < self._rows.num_prompt[row]
        return scored

    def _score(self, row: int, hidden: Tensor, targets: Int64s) -> LogprobsTensors:
        """Logprobs of `targets` [n] predicted by `hidden` [n, hidden], with bounded logits."""
        num_alternatives = self._rows.num_prompt_logprobs[row]
        assert num_alternatives is not None
        size = max(1, _PROMPT_LOGITS_ELEMENTS // self._config.model.spec.vocab_size)
        target_ids = to_device(targets, self._device)
        return join_logprobs(
            [
                self._find_logprobs(
                    self._model.compute_logits(hidden[start : start + size]).float(),
                    target_ids[start : start + size],
                    num_alternatives,
                )
                for start in range(0, len(targets), size)
            ]
        )

    def _pool(self, hidden: Tensor, pooled: PooledRows) -> LaunchedVectors | None:
        assert self._pooler is not None
        return self._pooler.pool(hidden, pooled)

    def _find_logprobs(self, logits: Tensor, token_ids: Tensor, num_others: int) -> LogprobsTensors:
        return compute_logprobs(logits.float(), token_ids, num_others)

    def _sample(self, row_ids: Int64s, logits: Tensor) -> SampledTokens:
        if len(row_ids) == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return SampledTokens(nothing, nothing.bool(), [])
        if self._faults is not None and self._faults.reach("worker.logits"):
            logits[0] = torch.nan
        # The forward pass is queued by now: waiting for the last step's tokens costs the device nothing.
        if self._in_flight and self._rows.needs_history[row_ids].any():
            self._commit_through(self._in_flight[-1])
        if self._library is not None and self._rows.is_greedy[row_ids].all():
            return SampledTokens(*launch_argmax(self._library, logits), [])
        batch = self._rows.make_sampling_batch(row_ids) if self._prepared is None else self._prepared.wait()
        self._prepared = None
        return sample(logits, batch)

    def _prepare_beside(self, row_ids: Int64s) -> None:
        """Have masks computed while the model runs, where another thread is worth it.

        Where the device is another one it works while this thread computes them.
        """
        rows = self._rows
        if self.is_async or not rows.with_grammar or not self._grammars.is_slow:
            return
        if rows.with_grammar.isdisjoint(row_ids.tolist()):
            return

        def prepare() -> SamplingBatch:
            batch = rows.make_sampling_batch(row_ids)
            batch.prepare()
            return batch

        self._prepared = self._side_thread.start(prepare)

    def _advance(
        self,
        step_id: int,
        row_ids: Int64s,
        sampled: SampledTokens,
        computed: ComputedStep,
    ) -> LaunchedStep:
        """Enter the sampled tokens in their rows, or make room for them, and start the copies to the host."""
        tensors = [sampled.token_ids, sampled.is_bad]
        for _, logprobs in (*sampled.logprobs, *computed.prompt_logprobs):
            tensors += logprobs
        launched = LaunchedStep(
            step_id=step_id,
            rows=row_ids,
            pending=None,
            copies=HostCopies(tensors),
            sample_groups=[group for group, _ in sampled.logprobs],
            prompt_rows=[row for row, _ in computed.prompt_logprobs],
            failed_rows=[
                RowFailure(int(row_ids[row.index]), row.failure, row.is_poison) for row in sampled.failures
            ],
            execute_s=0.0,
            row_work=[
                RowWork(int(row_ids[index]), work_us)
                for index, work_us in sampled.work_us.items()
                if work_us >= MIN_ROW_WORK_US
            ],
        )
        if self.is_async:
            assert computed.sampling_rows is not None
            self._make_room(launched, sampled.token_ids, computed.sampling_rows)
        elif len(row_ids):  # not of a step of vectors
            self._rows.append_sampled(row_ids, launched.copies.wait()[0])
        return launched

    def _make_room(self, launched: LaunchedStep, token_ids: Tensor, sampling_rows: Tensor) -> None:
        """Advance the rows by tokens that only the device knows."""
        rows, row_ids = self._rows, launched.rows
        self._num_launches += 1
        launched.pending = PendingTokens(
            self._num_launches, rows.num_known[row_ids], rows.generation[row_ids]
        )
        rows.num_known[row_ids] += 1
        rows.pending_launch[row_ids] = self._num_launches
        self._last_tokens[sampling_rows] = token_ids
        self._in_flight.append(launched)

    def _commit_through(self, launched: LaunchedStep) -> None:
        """Write the tokens of `launched` and of the steps before it into the rows of their requests."""
        while launched.pending is not None and self._in_flight:
            oldest = self._in_flight.popleft()
            pending = oldest.pending
            assert pending is not None
            token_ids = oldest.copies.wait()[0]
            self._rows.fill_pending(
                oldest.rows, pending.positions, token_ids, pending.generations, pending.launch
            )
            oldest.pending = None


def _make_pooler(config: EngineConfig, model: Model, device: torch.device) -> Pooler | None:
    if model.pooling_head is None:
        return None
    return Pooler(config.model.spec, model.pooling_head, config.scheduler.max_num_seqs, device)


def _pack_rows(launched: LaunchedStep, arrays: list[NDArray[Any]]) -> list[RowLogprobs]:
    """RowLogprobs of a step from `arrays`, which hold ids, values and ranks of each group in turn."""
    groups = [arrays[start : start + 3] for start in range(0, len(arrays), 3)]
    num_sample_groups = len(launched.sample_groups)
    sample: dict[int, LogprobsBlock] = {}
    for indexes, tensors in zip(launched.sample_groups, groups[:num_sample_groups], strict=True):
        sample.update(zip(launched.rows[indexes].tolist(), pack_positions(*tensors), strict=True))
    prompt = {
        row: pack_logprobs(*tensors)
        for row, tensors in zip(launched.prompt_rows, groups[num_sample_groups:], strict=True)
    }
    return [RowLogprobs(row, sample.get(row), prompt.get(row)) for row in sample | prompt]
