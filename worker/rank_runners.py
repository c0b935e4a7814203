"""Runners of a group of ranks: each computes its part of a step, rank 0 samples, the others take its tokens.

All ranks are sent the same steps, and their rows agree after each of them: prompts, tokens and counts. What
only sampling reads (edits, filters, grammars, logprobs) rank 0 alone has. Nobody begins a step before it has
the tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from ..ipc.config import EngineConfig
from ..ipc.sampling_params import SamplingParams
from ..ipc.step import NewRequestData, SchedulerOutput
from ..ipc.token_lists import TokenLists
from ..kernels.shared_group import SharedGroup
from .attention.metadata import KVCaches
from .model_runner import GPUModelRunner, LaunchedStep
from .models.decoder import Decoder
from .pooling.pooler import LaunchedVectors, PooledRows
from .sampling.logits_processor import LogitsProcessor
from .sampling.logprobs import LogprobsTensors
from .sampling.sampler import SampledTokens

Int64s = NDArray[np.int64]


class _RankRunner(GPUModelRunner):
    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_caches: KVCaches,
        device: torch.device,
        group: SharedGroup,
    ) -> None:
        self._group = group
        super().__init__(config, model, kv_caches, device, is_async=False)


class LeadingRunner(_RankRunner):
    """Rank 0's."""

    def _sample(self, row_ids: Int64s, logits: Tensor) -> SampledTokens:
        sampled = super()._sample(row_ids, logits)
        if len(row_ids):
            self._group.broadcast(sampled.token_ids)
        return sampled


class FollowingRunner(_RankRunner):
    """Another rank's. Its answers hold rank 0's tokens and nothing else."""

    def use_logits_processors(self, processors: Sequence[type[LogitsProcessor]]) -> None:
        """Nothing: they edit logits, and this rank has none."""

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        if step.new_requests:
            requests = [_drop_sampling(request) for request in step.new_requests]
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
    model: Decoder,
    kv_caches: KVCaches,
    device: torch.device,
    group: SharedGroup | None,
) -> GPUModelRunner:
    """The runner of this rank of `group`, or of a device that has the whole model."""
    if group is None:
        return GPUModelRunner(config, model, kv_caches, device)
    runner = FollowingRunner if group.rank else LeadingRunner
    return runner(config, model, kv_caches, device, group)


def _drop_sampling(request: NewRequestData) -> NewRequestData:
    """The request without what only sampling reads; every rank computes its part of prompt logits."""
    if request.pooling_params is not None:
        return request
    params = SamplingParams(temperature=0.0, prompt_logprobs=request.sampling_params.prompt_logprobs)
    return replace(request, sampling_params=params, token_lists=TokenLists(), grammar="", extra_args="")
