"""Runners of a group of ranks: each computes its part of a step, rank 0 samples, the others take its tokens.

All ranks are sent the same steps, and their rows agree after each of them: prompts, tokens and counts. What
only sampling reads (edits, filters, grammars, logprobs) rank 0 alone has. Nobody begins a step before it has
the tokens of the one before. Of a pipeline's stages these are the ranks of the last; the others' runner is in
stage_runners.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from ..ipc.config import EngineConfig
from ..ipc.step import SchedulerOutput
from ..kernels.shared_group import SharedGroup
from .attention.metadata import KVCaches
from .model_runner import GPUModelRunner, LaunchedStep
from .models.decoder import Decoder
from .pooling.pooler import LaunchedVectors, PooledRows
from .sampling.logits_processor import LogitsProcessor
from .sampling.logprobs import LogprobsTensors
from .sampling.sampler import SampledTokens
from .stage_runners import EarlierStageRunner, StageLink, drop_sampling

Int64s = NDArray[np.int64]


class _RankRunner(GPUModelRunner):
    def __init__(
        self,
        config: EngineConfig,
        model: Decoder,
        kv_caches: KVCaches,
        device: torch.device,
        group: SharedGroup,
        link: StageLink | None,
    ) -> None:
        """`link`: to the stage whose hidden states this one goes on with; None: it has the whole model."""
        self._group, self._link = group, link
        super().__init__(config, model, kv_caches, device, is_async=False)

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        if self._link is not None:
            self._link.receive(self._model.embedding.table[: sum(step.num_tokens)])
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
    model: Decoder,
    kv_caches: KVCaches,
    device: torch.device,
    group: SharedGroup | None,
    link: StageLink | None = None,
) -> GPUModelRunner:
    """The runner of this rank of `group`, or of a device that has the whole model.

    `link` ties its stage to the others, where the model has several.
    """
    if group is None:
        return GPUModelRunner(config, model, kv_caches, device)
    if link is not None and not config.model.spec.stage.is_last:
        return EarlierStageRunner(config, model, kv_caches, device, link, sends=group.rank == 0)
    runner = FollowingRunner if group.rank else LeadingRunner
    return runner(config, model, kv_caches, device, group, link)
