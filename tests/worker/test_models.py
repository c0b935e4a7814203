"""The native families against transformers, on random tiny checkpoints in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import OTHERS, ROPE_TYPES, Checkpoint, Recipe, find_tolerance, make_checkpoint, make_spec
from checkpoints import RECIPES as USUAL
from decoders import DECODERS
from paged import compute_alone
from quire.frontend.models.families import ARCHITECTURES, read_model_spec
from quire.worker.models import load_model

CPU = torch.device("cpu")
LENGTH = 45  # past the trained length of 32, not a multiple of the block size

RECIPES = {
    **{f"llama-{rope}": Recipe(rope=rope) for rope in ROPE_TYPES},
    "llama-mha": Recipe(num_heads=3, num_kv_heads=3, head_size=8),
    "llama-mqa-biased": Recipe(num_kv_heads=1, attention_bias=True, mlp_bias=True),
    "llama-tied-yarn-mscale": Recipe(
        rope="yarn", tied=True, rope_extra={"mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}
    ),
    "mistral-window": Recipe(family="mistral", sliding_window=13),
    "mistral-full-mqa": Recipe(family="mistral", num_kv_heads=1),
    "qwen2-dynamic": Recipe(family="qwen2", rope="dynamic"),
    "qwen2-window-of-some-layers": Recipe(family="qwen2", sliding_window=16, max_window_layers=1, tied=True),
    "qwen3": Recipe(family="qwen3"),
    "qwen3-mha-tied-llama3": Recipe(family="qwen3", rope="llama3", num_kv_heads=4, tied=True),
    "gemma2": Recipe(family="gemma2", sliding_window=13, tied=True, num_layers=3),
    "gemma": OTHERS["gemma"],
    "gemma3": USUAL["gemma3"],
    "phi3-window": Recipe(family="phi3", sliding_window=13),
    "phi3-longrope": OTHERS["phi3-longrope"],
    "phi3-partial": OTHERS["phi3-partial"],
    "smollm3": OTHERS["smollm3"],
    "mixtral": Recipe(family="mixtral", num_kv_heads=1),
    "qwen3-moe": Recipe(family="qwen3_moe", rope="yarn", num_layers=3, mlp_only_layers=(1,)),
    "olmo2-mqa": Recipe(family="olmo2", num_kv_heads=1, rope="llama3"),
    "olmo2-biased": Recipe(family="olmo2", attention_bias=True, num_layers=3, tied=True),
    "gemma2-untied-mqa": Recipe(family="gemma2", sliding_window=200, num_kv_heads=1, attention_bias=True),
    "mixtral-window-one-expert": Recipe(family="mixtral", sliding_window=13, num_experts_per_tok=1),
    "qwen3-moe-every-expert": Recipe(family="qwen3_moe", num_experts_per_tok=8, norm_topk_prob=False),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root: Path = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, recipe) for name, recipe in RECIPES.items()}


def test_every_architecture_is_among_the_recipes() -> None:
    recipes = {make_spec(recipe).architecture for recipe in RECIPES.values()}
    assert recipes | {architecture for architecture, _ in DECODERS.values()} == set(ARCHITECTURES)


def test_config_json_means_the_spec_that_is_stated_by_hand(checkpoints: dict[str, Checkpoint]) -> None:
    for name, checkpoint in checkpoints.items():
        config = json.loads((checkpoint.folder / "config.json").read_bytes())
        assert read_model_spec(config) == checkpoint.spec, name


@pytest.mark.parametrize("name", RECIPES)
def test_logits_equal_transformers_in_any_chunking(checkpoints: dict[str, Checkpoint], name: str) -> None:
    checkpoint = checkpoints[name]
    token_ids, config = checkpoint.draw_tokens(LENGTH), checkpoint.engine_config()
    expected, model = checkpoint.compute_reference(token_ids), load_model(config, CPU)
    for chunk in (None, 1, 7, 16):
        actual = compute_alone(model, config, token_ids, chunk)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=0, atol=find_tolerance(checkpoint, expected))
