"""The bench's checkpoints: complete, the same every time, and read by transformers unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quire.tools.bench.models import (
    BENCH_MODELS,
    DUMMY_MODELS,
    ensure_model,
    list_tensor_shapes,
    write_checkpoint,
)

pytestmark = pytest.mark.slow


def test_small_has_the_shape_of_qwen3_600m() -> None:
    sizes = [torch.Size(shape).numel() for shape in list_tensor_shapes(BENCH_MODELS["small"]).values()]
    assert sum(sizes) == 596_049_920


def test_a_checkpoint_is_written_once_and_is_the_same_every_time(tmp_path: Path) -> None:
    first = ensure_model("tiny", tmp_path / "a")
    written_at = (first / "model.safetensors").stat().st_mtime_ns
    assert ensure_model("tiny", tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_at
    second = ensure_model("tiny", tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [first.name], "scratch was left behind"


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-0.6b"])
def test_a_model_without_weights_is_a_config_and_a_tokenizer(name: str, tmp_path: Path) -> None:
    folder = ensure_model(name, tmp_path)
    assert not list(folder.glob("*.safetensors"))
    assert json.loads((folder / "config.json").read_text()) == DUMMY_MODELS[name]


@pytest.mark.parametrize("name", BENCH_MODELS)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_finds_every_tensor_and_nothing_else(name: str, tmp_path: Path) -> None:
    import transformers

    config = BENCH_MODELS[name] | {"num_hidden_layers": 1, "vocab_size": 64}  # small enough for a test
    write_checkpoint(config, tmp_path / name)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / name, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert json.loads((tmp_path / name / "config.json").read_text())["model_type"] == model.config.model_type
