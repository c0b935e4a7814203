"""The bench's checkpoints: complete, the same every time, and read by transformers unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quire.tools.bench.gguf_models import write_gguf
from quire.tools.bench.model_facts import quantize_facts, read_gguf_facts, read_model_facts
from quire.tools.bench.models import BENCH_MODELS, ensure_model, list_tensor_shapes, write_checkpoint
from safetensors.torch import load_file


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


def test_facts_are_those_of_the_tensors(tmp_path: Path) -> None:
    folder = ensure_model("tiny", tmp_path)
    facts = read_model_facts("tiny", folder)
    tensors = load_file(folder / "model.safetensors")
    assert facts.num_params == sum(tensor.numel() for tensor in tensors.values())
    assert facts.size.num_head_params == 2048 * 128
    assert facts.size.num_layer_params == facts.num_params - 2 * 2048 * 128
    assert (facts.vocab_size, facts.dtype, facts.size.bytes_per_param) == (2048, "bf16", 2)
    quantized = quantize_facts(facts, "int8")
    assert quantized.size.step_bytes == facts.size.step_bytes / 2
    assert quantize_facts(facts, "int4").size.step_bytes < quantized.size.step_bytes
    assert quantized.size.kv_bytes_per_token == facts.size.kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "num_params", "kv_bytes"),
    [("llama-8b", 8_030_261_248, 131_072), ("qwen3-0.6b", 596_049_920, 114_688)],
)
def test_a_model_without_weights_has_the_sizes_of_its_shape(
    name: str, num_params: int, kv_bytes: int, tmp_path: Path
) -> None:
    folder = ensure_model(name, tmp_path)
    assert not list(folder.glob("*.safetensors"))
    facts = read_model_facts(name, folder, is_dummy=True)
    assert (facts.num_params, facts.size.kv_bytes_per_token) == (num_params, kv_bytes)
    with pytest.raises(ValueError, match="has no safetensors"):
        read_model_facts(name, folder)


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


def test_a_gguf_file_has_the_tensors_of_its_model_in_4_bits(tmp_path: Path) -> None:
    config = BENCH_MODELS["small"] | {"num_hidden_layers": 1, "vocab_size": 320}  # small enough for a test
    write_checkpoint(config, tmp_path / "plain")
    write_gguf(config, load_file(tmp_path / "plain" / "model.safetensors"), tmp_path / "plain.gguf")
    facts, plain = read_gguf_facts(tmp_path / "plain.gguf"), read_model_facts("plain", tmp_path / "plain")
    assert facts.dtype == "q4_0"
    assert (facts.num_params, facts.vocab_size) == (plain.num_params, 320)
    # 32 numbers in 18 bytes; norms stay in float32
    assert facts.size.step_bytes == pytest.approx(plain.num_params * 18 / 32, rel=0.01)
