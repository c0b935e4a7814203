"""The ranks of a group as threads, each with its own part of a model, and stages one after the other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from quire.ipc.spec.config import EngineConfig
from quire.ipc.spec.model_spec import find_stages
from quire.kernels.group.shared_group import GroupAborted, SharedGroup
from quire.worker.attention.metadata import AttentionMetadata, KVCaches
from quire.worker.models import load_model
from torch import Tensor

CPU = torch.device("cpu")
Result = TypeVar("Result")
_TIMEOUT_S = 60.0


def run_ranks(
    size: int,
    act: Callable[[SharedGroup], Result],
    make: Callable[[str, int, int], SharedGroup] = SharedGroup,
) -> list[Result]:
    """What `act` returns in each rank. When one raises, so do the others, and its error is raised here.

    `make` returns a rank's group for a path, its number and how many there are.
    """
    fd = os.memfd_create("group")
    try:

        def run(rank: int) -> Result:
            group = make(f"/proc/self/fd/{fd}", rank, size)
            try:
                return act(group)
            except Exception as error:
                group.abort(str(error))
                raise

        with ThreadPoolExecutor(size) as threads:
            futures = [threads.submit(run, rank) for rank in range(size)]
            wait(futures, _TIMEOUT_S)
            for future in sorted(futures, key=lambda one: isinstance(one.exception(0), GroupAborted)):
                future.result(0)
            return [future.result(0) for future in futures]
    finally:
        os.close(fd)


def with_ranks(config: EngineConfig, size: int, **parallel: Any) -> EngineConfig:
    """The config of an engine whose model so many ranks share."""
    return replace(config, parallel=replace(config.parallel, tensor_parallel_size=size, **parallel))


class Pipeline:
    """A model's stages one after the other, called as the whole model is."""

    def __init__(self, config: EngineConfig, num_stages: int, group: SharedGroup | None = None) -> None:
        parallel = replace(config.parallel, pipeline_parallel_size=num_stages)
        staged = replace(config, parallel=parallel)
        self.stages = [load_model(staged.for_stage(stage), CPU, group) for stage in range(num_stages)]
        self._layers = find_stages(config.model.spec, num_stages)
        self._state_offsets = config.for_rank().model.spec.state_offsets
        self.compute_logits = self.stages[-1].compute_logits

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: KVCaches,
        metadata: AttentionMetadata,
        *inputs: Any,
    ) -> Tensor:
        hidden = torch.empty(0)
        for stage, (first, end) in zip(self.stages, self._layers, strict=True):
            if first > 0:
                stage.embedding.table[: len(input_ids)] = hidden
            own = self._find_own(metadata, self._state_offsets[first])
            hidden = stage.forward(input_ids, positions, kv_caches[first:end], own, *inputs)
        return hidden

    def _find_own(self, metadata: AttentionMetadata, first: int) -> AttentionMetadata:
        """With states from a number of all layers' on, which the stage has as its own."""
        if metadata.states is None:
            return metadata
        states = dataclasses.replace(metadata.states, states=metadata.states.states[:, first:])
        return dataclasses.replace(metadata, states=states)

    def leave_native(self) -> None:
        """Go on layer by layer in Python."""
        for stage in self.stages:
            stage.native = None
