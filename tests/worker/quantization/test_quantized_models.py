"""Whole models in every quantized format: the logits of the same numbers in a plain checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Recipe, make_checkpoint
from paged import PagedRun
from quantized_checkpoints import FORMATS, quantize_checkpoint
from quire.frontend.engine_args import EngineArgs
from quire.worker.models import load_model

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "head_size": 16}
DENSE = Recipe(family="qwen3", num_layers=2, **SIZES)
EXPERTS = Recipe(family="qwen3_moe", num_layers=1, num_experts=4, num_experts_per_tok=2, **SIZES)
TIED = Recipe(family="qwen2", num_layers=1, tied=True, attention_bias=True, **SIZES)


def logits_of(folder: Path, **arguments: Any) -> torch.Tensor:
    args = EngineArgs(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64, **arguments)
    config = args.create_engine_config()
    run = PagedRun(load_model(config, torch.device("cpu")), config)
    run.add("a", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
    return run.run("a")


def quantize(tmp_path: Path, recipe: Recipe, name: str, **config: Any) -> tuple[Path, Path]:
    """(plain, quantized): folders of the same numbers."""
    checkpoint, folder = make_checkpoint(tmp_path / "plain", recipe), tmp_path / "quantized"
    values, writer = FORMATS[name]
    quantize_checkpoint(checkpoint.folder, folder, checkpoint.spec, {**values, **config}, writer)
    return checkpoint.folder, folder


def assert_same(plain: Path, quantized: Path) -> None:
    expected, found = logits_of(plain), logits_of(quantized)
    bound = 1e-4 * float(expected.abs().max())  # both round sums of some hundred terms in float32
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_model_computes_what_its_numbers_say(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, DENSE, name))


@pytest.mark.parametrize("name", ["gptq-4-act-order", "fp8-block", "w8a8"])
def test_experts_are_read_one_by_one(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, EXPERTS, name))


@pytest.mark.parametrize("name", ["awq", "nf4"])
def test_a_tied_table_stays_plain_and_biases_are_added(tmp_path: Path, name: str) -> None:
    assert_same(*quantize(tmp_path, TIED, name))
