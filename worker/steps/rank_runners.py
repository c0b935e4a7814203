"""Runners of a group of ranks: each computes its part of a step, rank 0 samples, the others take its tokens.

All ranks are sent the same steps, and their rows agree after each of them: prompts, tokens and counts. What
only sampling reads (edits, filters, grammars, logprobs) rank 0 alone has. Nobody begins a step before it has
the tokens of the one before. Of a pipeline's stages these are the ranks of the last; EarlierStageRunner is
the others'.
Legend: T tokens, R requests, S sampling requests of a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from ...ipc.params.sampling_params import SamplingParams
from ...ipc.protocol.step import ModelRunnerOutput, NewRequestData, SchedulerOutput
from ...ipc.protocol.token_lists import TokenLists
from ...ipc.spec.config import EngineConfig
from ...kernels.group.shared_group import SharedGroup
from ..attention.metadata import KVCaches
from ..models.decoder import Decoder
from ..models.model import Model
from ..pooling.pooler import LaunchedVectors, PooledRows
from ..sampling.logits_processor import LogitsProcessor
from ..sampling.logprobs import LogprobsTensors
from ..sampling.sampler import SampledTokens
from .model_runner import GPUModelRunner, LaunchedStep, PendingTokens
from .staging import HostCopies
from .step_inputs import build_step_inputs, find_sampling

Int64s = NDArray[np.int64]


class StageLink(Protocol):
    """How a stage is tied to those before and after it; the first comes after the last.

    What is sent arrives whole and in order. Where the other side cannot go on, both calls raise instead of
    waiting for ever. `SharedGroup` is one, between processes of one machine.
    """

    def send(self, data: Tensor) -> None:
        """Give it to all ranks of the next stage; called by the first rank of a stage."""
        ...

    def receive(self, data: Tensor) -> None:
        """Wait for what the stage before has sent; it has the size of `data`."""
        ...


class EarlierStageRunner(GPUModelRunner):
    """A rank of a pipeline's stage that is not the last one.

    It computes its layers of each step, in order, and passes the hidden states on; it samples nothing and
    answers nobody. The last stage's tokens come back to the first, which needs them for a row's next step and
    waits for no others.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_caches: KVCaches,
        device: torch.device,
        link: StageLink,
        *,
        sends: bool,
        states: Tensor | None = None,
    ) -> None:
        """`sends`: this rank gives the next stage what all ranks of this one have."""
        self._link, self._sends, self._inputs = link, sends, model.embedding.table
        self._is_first = config.model.spec.stage.is_first
        self._max_awaited = config.scheduler.max_steps_in_flight
        super().__init__(config, model, kv_caches, device, is_async=False, states=states)

    def use_logits_processors(self, processors: Sequence[type[LogitsProcessor]]) -> None:
        """Nothing: they edit logits, and this stage has none."""

    def reset_rows(self) -> None:
        super().reset_rows()
        self._awaited: deque[tuple[Int64s, PendingTokens]] = deque()  # tokens of these rows, step by step

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Compute the step's hidden states and pass them on; rows advance as if it were sampled."""
        started = time.perf_counter()
        self._apply_changes(replace(step, new_requests=[drop_sampling(one) for one in step.new_requests]))
        row_ids, num_tokens = np.array(step.rows, dtype=np.int64), np.array(step.num_tokens, dtype=np.int64)
        if self._is_first:
            self._take_tokens(row_ids)
        else:
            self._link.receive(self._inputs[: num_tokens.sum()])
        hidden = self._compute_layers(step, row_ids, num_tokens)
        if self._sends:
            self._link.send(hidden.contiguous())
        sampling_rows = row_ids[find_sampling(step)]
        if len(sampling_rows):
            self._expect_tokens(sampling_rows)
        execute_s = time.perf_counter() - started
        return LaunchedStep(step.step_id, sampling_rows, None, HostCopies([]), [], [], [], execute_s)

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """An empty answer, at once: the last stage answers."""
        return ModelRunnerOutput(launched.step_id, [], [], execute_s=launched.execute_s)

    def _compute_layers(self, step: SchedulerOutput, row_ids: Int64s, num_tokens: Int64s) -> Tensor:
        """[T, hidden]."""
        rows = self._rows
        if self._lays_out:
            self._tables.lay_out(row_ids, num_tokens)
        if self._native_steps is not None:
            return self._native_steps.compute_hidden(row_ids, num_tokens, rows.type_starts)
        inputs = build_step_inputs(step, rows, self._tables, self._has_dynamic_rope)
        hidden, _, _ = self._forward(inputs)
        rows.num_computed[inputs.rows] = inputs.seq_lens
        return hidden

    def _expect_tokens(self, row_ids: Int64s) -> None:
        """Advance the rows [S] by the tokens that the last stage is to sample."""
        rows = self._rows
        if not self._is_first:  # only their number counts here
            rows.append_sampled(row_ids, np.zeros_like(row_ids))
            return
        self._num_launches += 1
        pending = PendingTokens(self._num_launches, rows.num_known[row_ids], rows.generation[row_ids])
        rows.num_known[row_ids] += 1
        rows.pending_launch[row_ids] = self._num_launches
        self._awaited.append((row_ids, pending))
        # The oldest of so many have been sampled, or the core would not have sent a step more: they are taken
        # though no row may need them, or what is on its way would grow without end.
        while len(self._awaited) > self._max_awaited:
            self._take_oldest()

    def _take_tokens(self, row_ids: Int64s) -> None:
        """Wait until all tokens of these rows are known."""
        latest = int(self._rows.pending_launch[row_ids].max(initial=0))
        while self._awaited and self._awaited[0][1].launch <= latest:
            self._take_oldest()

    def _take_oldest(self) -> None:
        row_ids, pending = self._awaited.popleft()
        token_ids = torch.empty(len(row_ids), dtype=torch.int64)
        self._link.receive(token_ids)
        self._rows.fill_pending(
            row_ids, pending.positions, token_ids.numpy(), pending.generations, pending.launch
        )


def drop_sampling(request: NewRequestData) -> NewRequestData:
    """The request without what only sampling reads; it is pooled where it was to be."""
    if request.pooling_params is not None:
        return request
    params = SamplingParams(temperature=0.0, prompt_logprobs=request.sampling_params.prompt_logprobs)
    return replace(request, sampling_params=params, token_lists=TokenLists(), grammar="", extra_args="")


class _RankRunner(GPUModelRunner):
    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_caches: KVCaches,
        device: torch.device,
        group: SharedGroup,
        link: StageLink | None,
        states: Tensor | None = None,
    ) -> None:
        """`link`: to the stage whose hidden states this one goes on with; None: it has the whole model."""
        self._group, self._link, self._inputs = group, link, model.embedding.table
        super().__init__(config, model, kv_caches, device, is_async=False, states=states)

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        if self._link is not None:
            self._link.receive(self._inputs[: sum(step.num_tokens)])
        return super().launch(step)


class LeadingRunner(_RankRunner):
    """Rank 0's."""

    def _sample(self, row_ids: Int64s, logits: Tensor) -> SampledTokens:
        sampled = super()._sample(row_ids, logits)
        if len(row_ids):
            self._group.broadcast(sampled.token_ids.cpu())
            if self._link is not None:  # the first stage's next step needs them
                self._link.send(sampled.token_ids)
        return sampled


class FollowingRunner(_RankRunner):
    """Another rank's. Its answers hold rank 0's tokens and nothing else."""

    def use_logits_processors(self, processors: Sequence[type[LogitsProcessor]]) -> None:
        """Nothing: they edit logits, and this rank has none."""

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        if step.new_requests:
            requests = [drop_sampling(request) for request in step.new_requests]
            step = replace(step, new_requests=requests)
        return super().launch(step)

    def _pool(self, hidden: Tensor, pooled: PooledRows) -> LaunchedVectors | None:  # noqa: ARG002
        """Nothing: rank 0 has the same hidden states."""
        return None

    def _sample(self, row_ids: Int64s, logits: Tensor) -> SampledTokens:  # noqa: ARG002
        token_ids = torch.empty(len(row_ids), dtype=torch.int64)
        if len(row_ids):
            self._group.broadcast(token_ids)
        return SampledTokens(token_ids, torch.zeros(len(row_ids), dtype=torch.bool), [])

    def _find_logprobs(self, logits: Tensor, token_ids: Tensor, num_others: int) -> LogprobsTensors:  # noqa: ARG002
        nothing = torch.empty(0, 1)
        return LogprobsTensors(nothing.int(), nothing, nothing[:, 0].int())


def make_runner(
    config: EngineConfig,
    model: Model,
    kv_caches: KVCaches,
    device: torch.device,
    group: SharedGroup | None,
    link: StageLink | None = None,
    states: Tensor | None = None,
) -> GPUModelRunner:
    """The runner of this rank of `group`, or of a device that has the whole model.

    `link` ties its stage to the others, where the model has several.
    """
    if group is None:
        return GPUModelRunner(config, model, kv_caches, device, states=states)
    assert isinstance(model, Decoder)
    if link is not None and not config.model.spec.stage.is_last:
        return EarlierStageRunner(
            config, model, kv_caches, device, link, sends=group.rank == 0, states=states
        )
    runner = FollowingRunner if group.rank else LeadingRunner
    return runner(config, model, kv_caches, device, group, link, states)
