"""Random tiny checkpoints of every native family, made with transformers: the oracle of the golden tests.

A checkpoint is a folder in Hugging Face's layout, and the ModelShape that its config.json means.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from quire.ipc.config import EngineConfig, ModelConfig, ModelShape, RopeConfig
from quire.worker.first_calls import make_first_calls

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# Scaling of each type around a trained length of 32, so that prompts of 40-60 tokens are past it.
TRAINED_LEN = 32
_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED_LEN,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED_LEN},
}
_ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a tiny checkpoint is made of; the defaults are a grouped-query Llama."""

    family: str = "llama"
    rope: str = "default"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    hidden_size: int = 48
    intermediate_size: int = 80
    num_layers: int = 2
    vocab_size: int = 131
    tied: bool = False
    sliding_window: int | None = None
    # Layers from this one on slide (qwen2, qwen3); earlier ones see everything.
    max_window_layers: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    seed: int = 0
    rope_extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved model: its folder, its shape as Quire states it, and transformers' own instance."""

    folder: Path
    shape: ModelShape
    reference: Any  # transformers' model, in float32, in eval mode

    def engine_config(self, dtype: str = "float32", max_model_len: int = 256, **model: Any) -> EngineConfig:
        """An EngineConfig for this checkpoint; `model` overrides fields of its ModelConfig."""
        fields: dict[str, Any] = {
            "model": str(self.folder),
            "served_model_name": "tiny",
            "tokenizer": str(self.folder),
            "shape": self.shape,
            "dtype": dtype,
            "max_model_len": max_model_len,
        }
        return EngineConfig(model=ModelConfig(**(fields | model)))


def make_checkpoint(folder: Path, recipe: Recipe, max_shard_size: str = "5GB") -> Checkpoint:
    """Make a random model of the recipe, save it into `folder` and keep it as reference."""
    torch.manual_seed(recipe.seed)
    model = make_reference(recipe)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Checkpoint(folder, make_shape(recipe), model)


def make_reference(recipe: Recipe) -> Any:
    """transformers' model with random weights, whose biases and norms differ from zero and one."""
    make_first_calls()
    config_name, model_name = _ARCHITECTURES[recipe.family]
    config = getattr(transformers, config_name)(**_config_fields(recipe))
    config._attn_implementation = "eager"
    model = getattr(transformers, model_name)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, 0.15)
    return model


def _config_fields(recipe: Recipe) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_size,
        "vocab_size": recipe.vocab_size,
        "max_position_embeddings": TRAINED_LEN if recipe.rope == "dynamic" else 512,
        "tie_word_embeddings": recipe.tied,
        "rope_parameters": {
            "rope_type": recipe.rope,
            "rope_theta": 10000.0,
            **_ROPES[recipe.rope],
            **recipe.rope_extra,
        },
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if recipe.family == "llama":
        fields |= {"attention_bias": recipe.attention_bias, "mlp_bias": recipe.mlp_bias}
    elif recipe.family == "mistral":
        fields |= {"sliding_window": recipe.sliding_window}
    else:
        fields |= {
            "use_sliding_window": recipe.sliding_window is not None,
            "sliding_window": recipe.sliding_window,
            "max_window_layers": recipe.max_window_layers,
        }
    if recipe.family == "qwen3":
        fields |= {"attention_bias": recipe.attention_bias}
    return fields


def make_shape(recipe: Recipe) -> ModelShape:
    """The ModelShape of the recipe, stated here by hand: the tests of config reading compare with it."""
    layers = range(recipe.num_layers)
    slides_by_layer = recipe.family in ("qwen2", "qwen3") and recipe.sliding_window is not None
    return ModelShape(
        architecture=_ARCHITECTURES[recipe.family][1],
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_kv_heads,
        head_size=recipe.head_size,
        norm_eps=1e-6,
        max_position_embeddings=TRAINED_LEN if recipe.rope == "dynamic" else 512,
        rope=RopeConfig(type=recipe.rope, theta=10000.0, **(_ROPES[recipe.rope] | recipe.rope_extra)),  # pyright: ignore[reportArgumentType]
        sliding_window=recipe.sliding_window,
        layer_is_sliding=tuple(i >= recipe.max_window_layers for i in layers) if slides_by_layer else (),
        tie_word_embeddings=recipe.tied,
        qkv_bias=recipe.family == "qwen2" or recipe.attention_bias,
        o_bias=recipe.attention_bias and recipe.family != "qwen2",
        mlp_bias=recipe.mlp_bias,
        has_qk_norm=recipe.family == "qwen3",
    )
