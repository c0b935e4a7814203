"""Random tiny checkpoints of every native family, made with transformers: the oracle of the golden tests.

A checkpoint is a folder in Hugging Face's layout, and the ModelSpec that its config.json means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec.structs import replace
from quire.ipc.spec.config import EngineConfig, ModelConfig
from quire.ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    ExpertStackSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
)
from quire.worker.first_calls import make_first_calls

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")  # those of every family

# Scaling of each type around a trained length of 32, so that prompts of 40-60 tokens are past it.
TRAINED_LEN = 32
ROPES: dict[str, dict[str, Any]] = {
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
    # Of phi3 alone, with 12 numbers of a head of 16.
    "longrope": {
        "original_max_position_embeddings": TRAINED_LEN,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.125, 1.25, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 1.75, 3.0, 5.0, 9.5, 14.0],
    },
}
# Small enough that the caps bend what random weights give, and a scale that the head size does not explain.
_GEMMA: dict[str, Any] = {
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 24,
}
_QK_NORMS: dict[str, Any] = {
    "qwen3": "each_head",
    "qwen3_moe": "each_head",
    "olmo2": "all_heads",
    "gemma3_text": "each_head",
}
# By model_type: what the names of transformers' classes begin with.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "phi3": "Phi3",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "qwen3_moe": "Qwen3Moe",
    "smollm3": "SmolLM3",
}
# Gemma 3 has a rope for each kind of its layers, which the tests of other families' settings do not know.
_CLASSES = FAMILIES | {"gemma3_text": "Gemma3"}


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
    # Of mixtral and qwen3_moe. Layers of the latter that stay dense; the experts are half as wide as they.
    num_experts: int = 8
    num_experts_per_tok: int = 3
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    seed: int = 0
    rope_extra: dict[str, Any] = field(default_factory=dict[str, Any])


# One of every family, which together reach every layer and operation; for tests that each family takes.
RECIPES = {
    "llama": Recipe(rope="llama3", attention_bias=True, mlp_bias=True),
    "mistral": Recipe(family="mistral", sliding_window=13, num_kv_heads=1, head_size=32),
    "qwen2": Recipe(family="qwen2", rope="dynamic", tied=True, rope_extra={"factor": 4.0}),
    "qwen3": Recipe(family="qwen3", rope="yarn", hidden_size=160, intermediate_size=336, vocab_size=600),
    "gemma2": Recipe(family="gemma2", sliding_window=13, tied=True, num_layers=3),
    "gemma3": Recipe(family="gemma3_text", sliding_window=13, tied=True, num_layers=3),
    "mixtral": Recipe(family="mixtral", num_kv_heads=1),
    "olmo2": Recipe(family="olmo2"),
    "qwen3-moe": Recipe(family="qwen3_moe", rope="yarn", num_layers=3, mlp_only_layers=(1,)),
}
# Further families, of the same layers: for tests of how weights are found and cut.
OTHERS = {
    "gemma": Recipe(family="gemma", num_kv_heads=1, tied=True),
    "phi3-window": Recipe(family="phi3", sliding_window=13),
    "phi3-longrope": Recipe(family="phi3", rope="longrope", hidden_size=64),
    "phi3-partial": Recipe(family="phi3", hidden_size=64, rope_extra={"partial_rotary_factor": 0.5}),
    "smollm3": Recipe(family="smollm3", num_layers=5, mlp_bias=True),
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved model: its folder, its spec as Quire states it, and transformers' own instance."""

    folder: Path
    spec: ModelSpec
    reference: Any  # transformers' model, in float32, in eval mode

    @property
    def num_terms(self) -> int:
        """Terms of the sums that a logit is made of: a layer rounds about 6 of `intermediate_size` terms."""
        return 6 * sum(layer.ffn.intermediate_size for layer in self.spec.layers)

    def draw_tokens(self, length: int, seed: int = 1) -> list[int]:
        """Random ids of its vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.spec.vocab_size, (length,), generator=generator).tolist()

    def compute_reference(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits of all tokens of a prompt."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0]

    def engine_config(self, dtype: str = "float32", max_model_len: int = 256, **model: Any) -> EngineConfig:
        """An EngineConfig for this checkpoint; `model` overrides fields of its ModelConfig."""
        fields: dict[str, Any] = {
            "model": str(self.folder),
            "served_model_name": "tiny",
            "tokenizer": str(self.folder),
            "spec": self.spec,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "weight_files": tuple(sorted(file.name for file in self.folder.glob("*.safetensors"))),
        }
        return EngineConfig(model=ModelConfig(**(fields | model)))


def find_tolerance(checkpoint: Checkpoint, expected: torch.Tensor) -> float:
    """Rounding errors of float32 along the longest chain: a random walk over the sums of each layer.

    Each layer rounds about 6 sums of `intermediate_size` terms; errors add as the root of their number, and
    the norms keep them relative to the largest logit. The factor 8 covers the spread over all logits.
    """
    return 8 * torch.finfo(torch.float32).eps * checkpoint.num_terms**0.5 * expected.abs().max().item()


def make_checkpoint(folder: Path, recipe: Recipe, max_shard_size: str = "5GB") -> Checkpoint:
    """Make a random model of the recipe, save it into `folder` and keep it as reference."""
    torch.manual_seed(recipe.seed)
    model = make_reference(recipe)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Checkpoint(folder, make_spec(recipe), model)


def make_reference(recipe: Recipe) -> Any:
    """transformers' model with random weights, whose biases and norms differ from zero and one."""
    make_first_calls()
    name, kind = _CLASSES[recipe.family], "Text" if recipe.family == "gemma3_text" else ""
    config = getattr(transformers, f"{name}{kind}Config")(**_config_fields(recipe))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
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
            **ROPES[recipe.rope],
            **recipe.rope_extra,
        },
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if recipe.family in ("llama", "smollm3"):
        fields |= {"attention_bias": recipe.attention_bias, "mlp_bias": recipe.mlp_bias}
    elif recipe.family in ("mistral", "mixtral"):
        fields |= {"sliding_window": recipe.sliding_window}
    elif recipe.family == "gemma2":
        fields |= {"sliding_window": recipe.sliding_window, "attention_bias": recipe.attention_bias}
        fields |= _GEMMA
    elif recipe.family == "gemma3_text":
        ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}
        ropes["full_attention"] = fields["rope_parameters"]
        kinds = [
            "full_attention" if index % 3 == 1 else "sliding_attention" for index in range(recipe.num_layers)
        ]
        fields |= {"sliding_window": recipe.sliding_window, "attention_bias": recipe.attention_bias}
        fields |= {"rope_parameters": ropes, "layer_types": kinds, "query_pre_attn_scalar": 24}
    elif recipe.family == "phi3":
        fields |= {"sliding_window": recipe.sliding_window, "original_max_position_embeddings": TRAINED_LEN}
    elif recipe.family in ("olmo2", "gemma"):
        fields |= {"attention_bias": recipe.attention_bias}
    else:
        fields |= {
            "use_sliding_window": recipe.sliding_window is not None,
            "sliding_window": recipe.sliding_window,
            "max_window_layers": recipe.max_window_layers,
        }
    if recipe.family in ("qwen3", "qwen3_moe"):
        fields |= {"attention_bias": recipe.attention_bias}
    if recipe.family in ("mixtral", "qwen3_moe"):
        fields |= {"num_local_experts": recipe.num_experts, "num_experts_per_tok": recipe.num_experts_per_tok}
    if recipe.family == "qwen3_moe":
        fields |= {
            "moe_intermediate_size": recipe.intermediate_size // 2,
            "norm_topk_prob": recipe.norm_topk_prob,
            "mlp_only_layers": list(recipe.mlp_only_layers),
        }
    return fields


def make_spec(recipe: Recipe) -> ModelSpec:
    """The ModelSpec of the recipe, stated here by hand: the tests of config reading compare with it."""
    attention = AttentionSpec(
        num_heads=recipe.num_heads,
        num_kv_heads=recipe.num_kv_heads,
        head_size=recipe.head_size,
        window=recipe.sliding_window,
        qkv_bias=recipe.family == "qwen2" or recipe.attention_bias,
        o_bias=recipe.attention_bias and recipe.family != "qwen2",
        qk_norm=_QK_NORMS.get(recipe.family),
    )
    layer = LayerSpec(attention=attention, ffn=_make_ffn(recipe))
    is_gemma, is_olmo = recipe.family in ("gemma2", "gemma3_text"), recipe.family == "olmo2"
    soft_cap = 2.0 if recipe.family == "gemma2" else None
    if is_olmo:
        out_names = {
            "attention_out_norm": "post_attention_layernorm",
            "ffn_out_norm": "post_feedforward_layernorm",
        }
        layer = replace(layer, attention_norm=None, ffn_norm=None, **out_names)
    if is_gemma:
        layer = LayerSpec(
            attention=replace(attention, scale=24**-0.5, soft_cap=soft_cap),
            ffn=DenseSpec(intermediate_size=recipe.intermediate_size, activation="gelu_tanh"),
            attention_out_norm="post_attention_layernorm",
            ffn_norm="pre_feedforward_layernorm",
            ffn_out_norm="post_feedforward_layernorm",
        )
    if recipe.family == "gemma":
        layer = replace(
            layer, ffn=DenseSpec(intermediate_size=recipe.intermediate_size, activation="gelu_tanh")
        )
    if recipe.family == "phi3":
        fused = replace(layer.ffn, gate="mlp.gate_up_proj", fused="gate_up")
        layer = replace(layer, attention=replace(attention, qkv=("self_attn.qkv_proj",)), ffn=fused)
    has_offset = recipe.family in ("gemma", "gemma2", "gemma3_text")
    return ModelSpec(
        architecture=f"{_CLASSES[recipe.family]}ForCausalLM",
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        layers=tuple(_change_layer(recipe, layer, index) for index in range(recipe.num_layers)),
        norm_eps=1e-5 if recipe.family in ("mixtral", "olmo2", "phi3") else 1e-6,
        norm_weight_offset=1.0 if has_offset else 0.0,
        norm_rounds_normed=not (has_offset or is_olmo),
        embedding_scale=recipe.hidden_size**0.5 if has_offset else None,
        logit_soft_cap=3.0 if recipe.family == "gemma2" else None,
        max_position_embeddings=TRAINED_LEN if recipe.rope == "dynamic" else 512,
        rope=_make_rope(recipe),
        tie_word_embeddings=recipe.tied,
    )


def _make_rope(recipe: Recipe) -> RopeConfig:
    settings = ROPES[recipe.rope] | recipe.rope_extra
    if partial := settings.pop("partial_rotary_factor", None):
        settings["rotated_size"] = int(recipe.head_size * partial)
    if recipe.rope == "longrope":
        for name in ("short_factor", "long_factor"):
            settings[f"{name}s"] = tuple(settings.pop(name))
        settings |= {
            "original_max_position_embeddings": TRAINED_LEN,
            "attention_factor": math.sqrt(1 + math.log(512 / TRAINED_LEN) / math.log(TRAINED_LEN)),
        }
    return RopeConfig(type=recipe.rope, theta=10000.0, **settings)  # pyright: ignore[reportArgumentType]


def _make_ffn(recipe: Recipe) -> DenseSpec | ExpertsSpec:
    experts = ExpertsSpec(
        num_experts=recipe.num_experts,
        num_experts_per_tok=recipe.num_experts_per_tok,
        intermediate_size=recipe.intermediate_size,
    )
    if recipe.family == "mixtral":
        names = {
            part: f"block_sparse_moe.experts.{{}}.w{n}" for part, n in (("gate", 1), ("up", 3), ("down", 2))
        }
        return replace(experts, router="block_sparse_moe.gate", **names)
    if recipe.family == "qwen3_moe":
        width = recipe.intermediate_size // 2
        parts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        stack = ExpertStackSpec(gate_up=parts[0], down=parts[1], is_transposed=None)
        changes: dict[str, Any] = {"norm_topk_prob": recipe.norm_topk_prob, "stack": stack}
        return replace(experts, intermediate_size=width, **changes)
    return DenseSpec(intermediate_size=recipe.intermediate_size, bias=recipe.mlp_bias)


def _change_layer(recipe: Recipe, layer: LayerSpec, index: int) -> LayerSpec:
    """The layer with what its place in the model changes."""
    if index in recipe.mlp_only_layers:
        return replace(layer, ffn=DenseSpec(intermediate_size=recipe.intermediate_size))
    is_full = recipe.family in ("qwen2", "qwen3") and index < recipe.max_window_layers
    if recipe.family == "gemma3_text" and index % 3 != 1:
        return replace(layer, attention=replace(layer.attention, rope=RopeConfig(theta=1000.0)))
    if recipe.family == "smollm3" and index % 4 == 3:
        return replace(layer, attention=replace(layer.attention, rope=RopeConfig(type="none")))
    if is_full or recipe.family == "gemma3_text" or (recipe.family == "gemma2" and index % 2 == 1):
        return replace(layer, attention=replace(layer.attention, window=None))
    return layer
