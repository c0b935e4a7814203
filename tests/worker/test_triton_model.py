"""Whole tiny models through the Triton kernels, against transformers and in any company."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint, Recipe, find_tolerance, make_checkpoint
from decoders import DECODERS, make_decoder
from kernel_checks import TRITON_DEVICE as DEVICE
from paged import PagedRun
from quire.ipc.spec.model_spec import AttentionSpec
from quire.kernels.triton import triton_runtime
from quire.worker.attention import make_attention
from quire.worker.attention.torch_attention import TorchAttention
from quire.worker.models import load_model

pytest.importorskip("triton_interpreter")

LENGTH = 27


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu", "cuda"})


@pytest.fixture(
    scope="module",
    params=["qwen3", "mistral-window", "gemma2", "minicpm3", pytest.param("olmo2", marks=pytest.mark.slow)],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    if request.param in DECODERS:
        return make_decoder(folder, request.param, num_hidden_layers=1)
    recipe = {
        "qwen3": Recipe(family="qwen3", num_layers=1),
        "mistral-window": Recipe(family="mistral", sliding_window=13, num_kv_heads=1, num_layers=1),
        "gemma2": Recipe(family="gemma2", sliding_window=13, num_layers=1),
        "olmo2": Recipe(family="olmo2", num_layers=1),
    }[request.param]
    return make_checkpoint(folder, recipe)


def make_run(checkpoint: Checkpoint) -> PagedRun:
    config = checkpoint.engine_config()
    model = load_model(config, DEVICE)
    (attention,) = model.attention_backends
    assert type(attention).__name__ == "TritonAttention"
    return PagedRun(model, config, device=DEVICE)


def test_prefill_chunks_and_decodes_of_a_batch_equal_transformers(checkpoint: Checkpoint) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = {
        name: torch.randint(checkpoint.spec.vocab_size, (length,), generator=generator).tolist()
        for name, length in (("a", LENGTH), ("b", 14))
    }
    run = make_run(checkpoint)
    for name, token_ids in prompts.items():
        run.add(name, token_ids)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    for step in ({"a": 14}, {"b": 12, "a": 1}, {"a": 1, "b": 1}, {"b": 1, "a": LENGTH - 16}):
        for name, logits in run.step(step).items():
            parts[name].append(logits.cpu())
    for name, token_ids in prompts.items():
        expected = checkpoint.compute_reference(token_ids)
        atol = find_tolerance(checkpoint, expected)
        torch.testing.assert_close(torch.cat(parts[name]), expected, rtol=0, atol=atol)


def test_a_head_size_without_a_kernel_costs_one_log_line_and_torch_attends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=648)
    with caplog.at_level(logging.WARNING):
        backend = make_attention(spec, torch.float32, DEVICE)
    assert isinstance(backend, TorchAttention)
    assert [record.message for record in caplog.records] == [
        "Triton's paged attention does not cover head size 648: even ones from 2 to 256 are covered; "
        "torch operations take its place"
    ]


def test_logits_stay_narrow_only_where_the_sampler_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    types: dict[str, torch.dtype] = {}
    for family in ("qwen3", "gemma2"):  # the second caps its logits
        checkpoint = make_checkpoint(tmp_path / family, Recipe(family=family, num_layers=1))
        model = load_model(checkpoint.engine_config("bfloat16"), DEVICE)
        types[family] = model.compute_logits(hidden[:, : checkpoint.spec.hidden_size]).dtype
    assert types == {"qwen3": torch.bfloat16, "gemma2": torch.float32}
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cuda"})
    checkpoint = make_checkpoint(tmp_path / "cpu", Recipe(family="qwen3", num_layers=1))
    model = load_model(checkpoint.engine_config("bfloat16"), torch.device("cpu"))
    assert model.compute_logits(hidden.cpu()[:, : checkpoint.spec.hidden_size]).dtype == torch.float32
