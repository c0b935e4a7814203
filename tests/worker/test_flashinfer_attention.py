"""FlashInfer as a backend: what it is told of a step, beside the reference; who gets it, and with graphs."""

from __future__ import annotations

import importlib.machinery
import logging
import sys
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
import torch
from attention_step import AttentionStep
from quire.frontend.options.engine_args import EngineArgs
from quire.ipc.errors import ConfigError, ModelError
from quire.ipc.spec.model_spec import AttentionSpec
from quire.kernels.triton import triton_runtime
from quire.worker.attention import make_attention
from quire.worker.attention.metadata import AttentionMetadata
from torch import Tensor

pytest.importorskip("triton")

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
STEP = [(1, 40), (7, 23), (1, 1), (5, 5), (1, 33)]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    spec = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setattr(fake_flashinfer, "__spec__", spec)
    fake_flashinfer.put_compiler(tmp_path, monkeypatch)
    fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made.clear()


def make_spec(**changes: Any) -> AttentionSpec:
    values: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
    return AttentionSpec(**(values | changes))


def make_metadata(step: AttentionStep, is_on_host: bool = True) -> AttentionMetadata:
    lengths = step.query_starts.diff()
    return AttentionMetadata(
        step.query_starts,
        step.seq_lens.clone(),  # each step has its own
        step.block_tables,
        torch.zeros(len(step.query), dtype=torch.int64),
        int(lengths.max()),
        int(step.seq_lens.max()),
        query_starts_host=step.query_starts.numpy() if is_on_host else None,
        seq_lens_host=step.seq_lens.numpy() if is_on_host else None,
        block_tables_host=step.block_tables.numpy() if is_on_host else None,
    )


def draw(requests: list[tuple[int, int]]) -> AttentionStep:
    return AttentionStep.draw(requests, 8, 2, 64, dtype=DTYPE)


def pack(query: Tensor) -> Tensor:
    """As a layer has queries: the first columns of qkv."""
    flat = query.flatten(1)
    return torch.cat((flat, torch.full((len(flat), 4 * 64), torch.nan, dtype=flat.dtype)), 1)


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"window": 9}, {"soft_cap": 5.0}, {"scale": 0.3, "window": 16, "soft_cap": 2.0}]
)
def test_a_mixed_step_is_planned_once_and_equals_the_reference(
    changes: dict[str, Any], is_on_host: bool
) -> None:
    spec, step = make_spec(**changes), draw(STEP)
    backend = make_attention(spec, DTYPE, CPU, wanted="flashinfer")
    assert backend.name == "flashinfer"
    metadata = make_metadata(step, is_on_host)
    caches = step.k_cache, step.v_cache
    expected = step.reference(spec.window, spec.soft_cap, spec.scale).flatten(1)
    for _ in range(2):  # layers
        attended = backend.attend(pack(step.query), caches, metadata, spec)
        torch.testing.assert_close(attended, expected, rtol=0, atol=0)
    [wrapper] = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made
    assert wrapper.num_plans == 1
    assert wrapper.window_left == changes.get("window", 0) - 1
    backend.attend(pack(step.query), caches, make_metadata(step), spec)  # the next step
    assert wrapper.num_plans == 2


def test_layers_of_other_windows_have_plans_of_their_own() -> None:
    step = draw(STEP)
    backend = make_attention(make_spec(), DTYPE, CPU, wanted="flashinfer")
    metadata, caches = make_metadata(step), (step.k_cache, step.v_cache)
    for window in (None, 9, None, 9):
        attended = backend.attend(pack(step.query), caches, metadata, make_spec(window=window))
        torch.testing.assert_close(attended, step.reference(window).flatten(1), rtol=0, atol=0)
    assert [one.num_plans for one in fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made] == [1, 1]


@pytest.mark.parametrize(
    ("requests", "num_tokens", "num_requests"),
    [(STEP, 24, 9), (STEP, 15, 6), ([(1, 40), (1, 3), (1, 17)], 4, 4), ([(1, 7)], 1, 1)],
)
def test_a_graphs_wrapper_is_planned_again_for_every_smaller_step(
    requests: list[tuple[int, int]], num_tokens: int, num_requests: int
) -> None:
    spec, backend = make_spec(window=30), make_attention(make_spec(), DTYPE, CPU, wanted="flashinfer")
    step = draw(requests)
    caches, count = (step.k_cache, step.v_cache), len(step.query)
    bounds = AttentionMetadata(
        torch.zeros(num_requests + 1, dtype=torch.int32),
        torch.zeros(num_requests, dtype=torch.int32),
        torch.zeros((num_requests, 8), dtype=torch.int32),
        torch.zeros(num_tokens, dtype=torch.int64),
        num_tokens,
        128,
        kind_bounds=(num_requests, num_requests),
    )
    query = torch.zeros((num_tokens, 8, 64), dtype=DTYPE)
    backend.attend(pack(query), caches, bounds, spec)  # as before the capture
    [wrapper] = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made
    assert wrapper.num_plans == 1
    query[:count] = step.query
    for repeat in range(2):
        backend.prepare_replay(num_tokens, num_requests, [make_metadata(step).to_host_step()], 16)
        attended = wrapper.run(query, caches)[:count].flatten(1)  # as a replay: no attend
        torch.testing.assert_close(attended, step.reference(30).flatten(1), rtol=0, atol=0)
        assert wrapper.num_plans == 2 + repeat


@pytest.mark.parametrize(
    ("spec", "dtype", "is_strict", "text"),
    [
        ({"head_size": 80}, DTYPE, False, "head size 80: 64, 128, 256 are covered"),
        ({}, torch.float32, False, "dtype torch.float32: bfloat16 and float16 are covered"),
        ({}, DTYPE, True, "exact rows are asked for"),
    ],
)
def test_what_it_does_not_cover_is_computed_by_ours_and_said_once(
    spec: dict[str, Any], dtype: torch.dtype, is_strict: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        backend = make_attention(make_spec(**spec), dtype, CPU, is_strict, "flashinfer")
    assert backend.name == "triton"
    [message] = [one for one in caplog.messages if "flashinfer" in one]
    assert text in message


def test_without_it_installed_ours_take_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    assert make_attention(make_spec(), DTYPE, CPU, wanted="flashinfer").name == "triton"
    assert "pip install flashinfer-python" in caplog.text


def test_without_a_compiler_for_it_ours_take_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert make_attention(make_spec(), DTYPE, CPU, wanted="flashinfer").name == "triton"
    assert "it has no nvcc to compile its kernels" in caplog.text


def test_one_that_does_not_load_is_said_to_and_ours_take_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text("raise OSError('libcudart.so.13:\\n no such file')")
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.syspath_prepend(tmp_path)
    assert make_attention(make_spec(), DTYPE, CPU, wanted="flashinfer").name == "triton"
    assert "it does not load: OSError: libcudart.so.13: no such file" in caplog.text


def test_one_of_ours_can_be_named_too() -> None:
    assert make_attention(make_spec(), DTYPE, CPU).name == "triton"
    assert make_attention(make_spec(), DTYPE, CPU, wanted="triton").name == "triton"
    assert make_attention(make_spec(), DTYPE, CPU, wanted="torch").name == "torch"


@pytest.mark.parametrize("name", ["FLASHINFER", "flashinfer", "TRITON_ATTN", "auto", None])
def test_vllms_names_are_taken(name: str | None) -> None:
    with pytest.raises(ModelError, match="no such model"):
        EngineArgs(model="no such model", attention_backend=name).create_engine_config()


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match="attention_backend='FLASH_ATTN': expected one of auto, FLASHINFER, TRITON"
    ):
        EngineArgs(model="m", attention_backend="FLASH_ATTN").create_engine_config()
