"""Graphs for steps: sizes, padding, what runs when, capturing, and equal tokens with graphs and without.

Without a GPU a stand-in takes the place of capture and replay: as a graph does, it computes on the tensors
that were there at the capture, with whatever they then hold, and overwrites one result.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import Checkpoint, Recipe, make_checkpoint
from decoders import make_decoder
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import CaptureError
from quire.ipc.params.sampling_params import SamplingParams
from quire.ipc.spec.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.kernels.triton import triton_runtime
from quire.worker.kv_cache import allocate_kv_caches
from quire.worker.models import Decoder, load_model
from quire.worker.steps import cuda_graphs
from quire.worker.steps.cuda_graphs import (
    GraphSize,
    GraphSizes,
    StepGraphs,
    can_capture,
    capture_on_cuda,
    make_ladder,
    make_step_graphs,
)
from quire.worker.steps.model_runner import GPUModelRunner
from quire.worker.steps.staging import StagingRing
from row_driver import Driver, make_prompt
from torch import Tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("max_num_seqs", "ladder"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_the_ladder_ends_with_the_most_requests_of_a_step(max_num_seqs: int, ladder: list[int]) -> None:
    assert make_ladder(max_num_seqs) == ladder


def test_the_sizes_waste_few_rows_and_are_few() -> None:
    sizes = GraphSizes(1000, 8192, captures_chunks=True)
    assert len(sizes.all) < 100
    assert sizes.all[0] == GraphSize(2048, 1000, is_mixed=True)
    assert [size.num_tokens for size in sizes.all] == sorted(
        (size.num_tokens for size in sizes.all), reverse=True
    )
    for count in range(1, 1001):
        size = sizes.choose(count, count)
        assert size in sizes.all
        assert not size.is_mixed
        assert count <= size.num_requests < count + (4 if count <= 8 else 8 if count <= 256 else 64)
        assert size.num_tokens == size.num_requests


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "tokens", "requests", "chosen"),
    [
        (256, 2048, 20, 1, (32, 8)),
        (256, 2048, 33, 32, (64, 64)),
        (256, 2048, 512, 9, (512, 64)),
        (256, 2048, 513, 200, (768, 256)),
        (256, 8192, 2048, 3, (2048, 8)),
        (256, 8192, 2049, 3, None),
        (256, 600, 600, 3, (600, 8)),
        (4, 48, 40, 4, (48, 4)),
        (4, 16, 10, 2, (16, 4)),
    ],
)
def test_a_mixed_step_is_padded_in_tokens_and_requests(
    max_num_seqs: int, max_tokens: int, tokens: int, requests: int, chosen: tuple[int, int] | None
) -> None:
    sizes = GraphSizes(max_num_seqs, max_tokens, captures_chunks=True)
    size = sizes.choose(tokens, requests)
    assert size == (None if chosen is None else GraphSize(*chosen, is_mixed=True))
    assert size is None or size in sizes.all
    assert GraphSizes(max_num_seqs, max_tokens, captures_chunks=False).choose(tokens, requests) is None


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


@dataclass
class Graphs:
    """Stands in for CUDA's: remembers computations, runs them again on replay."""

    num_tokens: list[int] = field(default_factory=list[int])  # of each capture
    num_replays: int = 0

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = torch.full_like(compute(), torch.nan)
        self.num_tokens.append(len(result))

        def replay() -> None:
            self.num_replays += 1
            result.copy_(compute())

        return replay, result


@pytest.fixture(scope="module", params=["qwen3", "minicpm3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    if request.param == "minicpm3":  # of latents
        return make_decoder(folder, request.param, num_hidden_layers=1, vocab_size=61)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "hidden_size": 16, "intermediate_size": 16}
    recipe = Recipe(family="qwen3", rope="dynamic", num_layers=1, vocab_size=61, **sizes)
    return make_checkpoint(folder, recipe)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Iterator[Decoder]:
    pytest.importorskip("triton_interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu"})
        patch.setattr(cuda_graphs, "_MIXED_TOKENS", (12, 32))  # the steps here are small
        loaded = load_model(make_config(checkpoint), CPU)
        assert loaded.is_capturable
        yield loaded


@pytest.fixture(scope="module")
def without_graphs(model: Decoder, checkpoint: Checkpoint) -> dict[str, list[int]]:
    return run_three(model, checkpoint, None)


def make_config(checkpoint: Checkpoint) -> EngineConfig:
    return msgspec.structs.replace(
        checkpoint.engine_config(max_model_len=64),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=20),
        cache=CacheConfig(block_size=8),
    )


def run_three(model: Decoder, checkpoint: Checkpoint, graphs: Graphs | None) -> dict[str, list[int]]:
    """Three requests of different lengths: prompts whole and in chunks, beside decodes that were launched
    ahead of their tokens; then decodes alone.
    """
    config = make_config(checkpoint)
    driver = Driver(config, num_blocks=7)
    caches = allocate_kv_caches(config, 7, CPU)
    for part in caches:
        for cache in part:
            cache.fill_(torch.nan)  # what is read without having been written would show
    driver.runner = runner = GPUModelRunner(config, model, caches, CPU, is_async=True)
    if graphs is not None:
        runner._graphs = StepGraphs(config, model, caches, runner._last_tokens)
        with torch.inference_mode():
            runner._graphs.capture(graphs.capture)
    for row, length in ((4, 5), (0, 12), (2, 7)):
        params = SamplingParams(temperature=0.7, seed=row, prompt_logprobs=0 if row == 2 else None)
        driver.enter(f"row {row}", row, make_prompt(length, seed=row), params)
    steps = [
        driver.launch({"row 4": 5, "row 0": 8}),
        driver.launch({"row 4": 1, "row 0": 4}),
        driver.launch({"row 2": 7, "row 0": 1, "row 4": 1}),
    ]
    for _ in range(3):
        steps.append(driver.launch(dict.fromkeys(driver.requests, 1)))
        driver.collect(steps.pop(0))
    while steps:
        driver.collect(steps.pop(0))
    return {name: request.tokens for name, request in driver.requests.items()}


def test_tokens_are_the_same_with_graphs_and_without(
    model: Decoder, checkpoint: Checkpoint, without_graphs: dict[str, list[int]]
) -> None:
    graphs = Graphs()
    assert run_three(model, checkpoint, graphs) == without_graphs
    assert graphs.num_tokens == [20, 12, 5, 4, 2, 1]
    assert graphs.num_replays == 6  # every step: prompts, what is beside them, and decodes


def test_captures_that_take_long_say_how_far_they_are(
    model: Decoder, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(checkpoint)
    clock = itertools.count(0, 1.5)  # seconds from one look to the next
    monkeypatch.setattr(cuda_graphs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    graphs = StepGraphs(config, model, allocate_kv_caches(config, 7, CPU), torch.zeros(5, dtype=torch.int64))
    with torch.inference_mode(), caplog.at_level(logging.INFO, cuda_graphs.__name__):
        graphs.capture(lambda _compute: (lambda: None, torch.empty(0)))
    said = [record.getMessage() for record in caplog.records]
    assert said == [*(f"captured {count} of 6 CUDA graphs" for count in (2, 4, 6)), said[-1]]
    assert said[-1].startswith("captured 6 CUDA graphs in ")


class FakeCuda:
    """CUDA's runtime as far as captures go; a capture may fail in the middle, and then at its end, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at
        runtime = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                assert not gc.isenabled()
                runtime.calls.append("begin")

            def capture_end(self) -> None:
                if runtime.is_failing:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                runtime.calls.append("end")

            def replay(self) -> None:
                runtime.calls.append("replay")

        class Stream:
            def wait_stream(self, other: object) -> None: ...

        @contextmanager
        def use(stream: object) -> Iterator[None]:
            assert isinstance(stream, Stream)
            runtime.calls.append("enter")
            yield

        fakes: dict[str, Any] = {
            "CUDAGraph": Graph,
            "Stream": lambda _device: Stream(),
            "stream": use,
            "current_stream": lambda _device: Stream(),
            "graph_pool_handle": lambda: "pool",
            "synchronize": lambda _device: self.calls.append("synchronize"),
            "empty_cache": lambda: self.calls.append("empty_cache"),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @property
    def is_failing(self) -> bool:
        return self._fails_at is not None and self.calls.count("begin") == self._fails_at

    def compute(self) -> Tensor:
        if self.is_failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.calls.append("compute")
        return torch.zeros(1)


def test_all_captures_share_one_wait_and_run_once_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with capture_on_cuda(torch.device("cuda")) as capture:
        graphs = [capture(cuda.compute) for _ in range(3)]
    assert cuda.calls == ["synchronize", "empty_cache", "enter", *["compute", "begin", "compute", "end"] * 3]
    graphs[2][0]()
    assert cuda.calls[-1] == "replay"
    assert gc.isenabled()


def test_a_failed_capture_names_its_first_cause_and_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, fails_at=2)
    with capture_on_cuda(torch.device("cuda")) as capture:
        capture(cuda.compute)
        with pytest.raises(CaptureError, match=r"enforce_eager=True .*: operation not permitted"):
            capture(cuda.compute)
    assert gc.isenabled()


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
    assert make_step_graphs(config, FakeModel(True), [], torch.zeros(5)) is None


def test_enforce_eager_is_an_engine_argument() -> None:
    assert EngineArgs(enforce_eager=True).create_engine_config().model.enforce_eager
    assert not EngineArgs().create_engine_config().model.enforce_eager
