"""Graphs for decode: the ladder, padding, what runs when, and equal tokens with graphs and without.

Without a GPU a stand-in takes the place of capture and replay: as a graph does, it computes on the tensors
that were there at the capture, with whatever they then hold, and overwrites one result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import Checkpoint, Recipe, make_checkpoint
from quire.frontend.engine_args import EngineArgs
from quire.ipc.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.ipc.sampling_params import SamplingParams
from quire.kernels import triton_runtime
from quire.worker.cuda_graphs import DecodeGraphs, can_capture, choose_size, make_decode_graphs, make_ladder
from quire.worker.kv_cache import allocate_kv_caches
from quire.worker.model_runner import GPUModelRunner
from quire.worker.models import Decoder, load_model
from quire.worker.rows.staging import StagingRing
from row_driver import Driver, make_prompt
from torch import Tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("max_num_seqs", "ladder"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_the_ladder_ends_with_the_most_requests_of_a_step(max_num_seqs: int, ladder: list[int]) -> None:
    assert make_ladder(max_num_seqs) == ladder


def test_the_ladder_wastes_few_rows_and_has_few_sizes() -> None:
    ladder = make_ladder(1000)
    assert ladder[-1] == 1000
    assert len(ladder) < 90
    for count in range(1, 1001):
        size = choose_size(ladder, count)
        assert count <= size < count + (4 if count <= 8 else 8 if count <= 248 else 16)


def test_a_staging_ring_keeps_what_is_on_its_way() -> None:
    ring = StagingRing(6, torch.int64, CPU, 2)
    first, target = ring.take(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    first[:] = 7
    ring.send(target)
    second = ring.take(3)
    second[:] = 9
    assert target.tolist() == [[7] * 3] * 2
    assert (first == 7).all()
    ring.send(target[0])
    assert target.tolist() == [[9] * 3, [7] * 3]
    assert np.shares_memory(ring.take(6), first)


class Graphs:
    """Stands in for CUDA's: remembers computations, runs them again on replay."""

    def __init__(self, fault: str | None = None) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self._fault = fault

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.num_captures += 1
        if self._fault is not None:
            raise RuntimeError(self._fault)
        result = torch.full_like(compute(), torch.nan)

        def replay() -> None:
            self.num_replays += 1
            result.copy_(compute())

        return replay, result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    recipe = Recipe(family="qwen3", rope="dynamic", num_layers=1, vocab_size=61, hidden_size=16)
    return make_checkpoint(folder, recipe)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[Decoder]:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu"})
        loaded = load_model(make_config(checkpoint), CPU)
        assert loaded.is_capturable
        yield loaded


@pytest.fixture(scope="module")
def without_graphs(model: Decoder, checkpoint: Checkpoint) -> dict[str, list[int]]:
    return run_three(model, checkpoint, None)


def make_config(checkpoint: Checkpoint) -> EngineConfig:
    return msgspec.structs.replace(
        checkpoint.engine_config(max_model_len=64),
        scheduler=SchedulerConfig(max_num_seqs=5),
        cache=CacheConfig(block_size=8),
    )


def run_three(model: Decoder, checkpoint: Checkpoint, graphs: Graphs | None) -> dict[str, list[int]]:
    """Three requests of different lengths, decoded together with a step launched ahead of the tokens."""
    config = make_config(checkpoint)
    driver = Driver(config)
    caches = allocate_kv_caches(config, 96, CPU)
    driver.runner = runner = GPUModelRunner(config, model, caches, CPU, is_async=True)
    if graphs is not None:
        runner._graphs = DecodeGraphs(config, model, caches, runner._last_tokens, graphs.capture)
    for row, length in ((4, 5), (0, 14), (2, 7)):
        params = SamplingParams(temperature=0.7, seed=row)
        driver.enter(f"row {row}", row, make_prompt(length, seed=row), params)
    steps = [driver.launch({name: request.num_known for name, request in driver.requests.items()})]
    for _ in range(3):
        steps.append(driver.launch(dict.fromkeys(driver.requests, 1)))
        driver.collect(steps.pop(0))
    driver.collect(steps.pop(0))
    return {name: request.tokens for name, request in driver.requests.items()}


def test_tokens_are_the_same_with_graphs_and_without(
    model: Decoder, checkpoint: Checkpoint, without_graphs: dict[str, list[int]]
) -> None:
    graphs = Graphs()
    assert run_three(model, checkpoint, graphs) == without_graphs
    # Three steps of three requests, all on size 4: one runs as it is, the second is captured.
    assert (graphs.num_captures, graphs.num_replays) == (1, 2)


def test_a_failed_capture_costs_one_log_line_and_no_token(
    model: Decoder,
    checkpoint: Checkpoint,
    without_graphs: dict[str, list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = Graphs(fault="operation not permitted")
    with caplog.at_level(logging.WARNING):
        tokens = run_three(model, checkpoint, graphs)
    assert tokens == without_graphs
    assert graphs.num_captures == 1
    assert [record.message for record in caplog.records] == [
        "CUDA graphs are off, steps run without: capture of 4 rows: operation not permitted"
    ]


@dataclass
class FakeModel:
    """Only says whether it can be captured."""

    is_capturable: bool


def test_a_cpu_enforce_eager_and_attention_on_the_host_leave_graphs_out(checkpoint: Checkpoint) -> None:
    config, cuda = make_config(checkpoint), torch.device("cuda")
    eager_model = msgspec.structs.replace(config.model, enforce_eager=True)
    eager = msgspec.structs.replace(config, model=eager_model)
    assert can_capture(config, FakeModel(True), cuda)
    assert not can_capture(eager, FakeModel(True), cuda)
    assert not can_capture(config, FakeModel(False), cuda)
    assert not can_capture(config, FakeModel(True), CPU)
    assert make_decode_graphs(config, FakeModel(True), [], torch.zeros(5)) is None


def test_enforce_eager_is_an_engine_argument() -> None:
    assert EngineArgs(enforce_eager=True).create_engine_config().model.enforce_eager
    assert not EngineArgs().create_engine_config().model.enforce_eager
