"""The bench's checkpoints: complete, the same every time, and read by transformers unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quire.tools.bench.bench_model import load_spec
from quire.tools.bench.model_configs import BENCH_MODELS, DUMMY_MODELS, ENCODERS
from quire.tools.bench.models import ensure_model, write_checkpoint
from quire.tools.bench.workloads import count_tokens, make_texts

pytestmark = pytest.mark.slow


def test_shapes_have_the_parameters_that_the_bench_says() -> None:
    assert load_spec("small").num_active_params == pytest.approx(596_049_920, rel=1e-3)  # Qwen3-0.6B
    assert 0.20e9 < load_spec("moe").num_active_params < 0.25e9


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


@pytest.mark.parametrize("name", [*BENCH_MODELS, "tiny-encoder"])
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_finds_every_tensor_and_nothing_else(name: str, tmp_path: Path) -> None:
    import transformers

    config = (BENCH_MODELS | ENCODERS)[name] | {"num_hidden_layers": 1, "vocab_size": 64}
    write_checkpoint(config, tmp_path / name)
    kind = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(tmp_path / name, dtype="auto", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == (torch.float32 if name in ENCODERS else torch.bfloat16)
    assert config["model_type"] == model.config.model_type


def test_texts_have_the_tokens_that_they_say_and_lengths_that_do_not_depend_on_contents(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    config = ENCODERS["tiny-encoder"]
    write_checkpoint(config, tmp_path / "encoder", has_weights=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder")
    first, second = (make_texts(config["vocab_size"], 8, 16, 256, contents) for contents in ("a", "b"))
    assert first != second
    assert list(map(count_tokens, first)) == list(map(count_tokens, second))
    for text in first:
        token_ids = tokenizer(text)["input_ids"]
        assert 16 <= len(token_ids) == count_tokens(text) <= 256
        assert tokenizer.unk_token_id not in token_ids
