"""config.json of an encoder, a classifier or a reward model means what transformers means by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.models.families import read_model_spec
from quire.frontend.models.families.encoders import ENCODERS
from quire.ipc.errors import ModelError
from quire.ipc.spec.model_spec import ModelSpec, RopeConfig
from refusals import Refusal, refusals

CONFIGS = json.loads((Path(__file__).parents[1] / "golden" / "encoder_configs.json").read_bytes())
BERT: dict[str, Any] = CONFIGS["BERT"]


def read_written(architecture: str, **values: Any) -> tuple[ModelSpec, Any]:
    """What is read of the config.json that transformers writes, and its own configuration."""
    import transformers

    sizes = CONFIGS["DISTILBERT" if architecture.startswith("Distil") else "BERT"]
    if architecture.startswith("Qwen"):
        values = {"num_key_value_heads": 2, **values}
    config = getattr(transformers, architecture).config_class(**{**sizes, **values})
    written = json.loads(config.to_json_string()) | {"architectures": [architecture]}
    return read_model_spec(written), config


@pytest.mark.parametrize("architecture", [name for name in ENCODERS if not name.startswith("New")])
def test_what_transformers_writes_for_an_encoder_is_read(architecture: str) -> None:
    spec, config = read_written(architecture)
    attention, ffn = spec.layers[-1].attention, spec.layers[-1].ffn
    assert spec.architecture == architecture
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (48, 4, 100)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 4, 12)
    assert ffn.intermediate_size == 80
    eps = getattr(config, "layer_norm_eps", getattr(config, "norm_eps", 1e-12))
    assert (spec.norm_kind, spec.norm_eps) == ("layer", eps)
    assert not spec.has_logits
    assert not spec.is_causal
    assert spec.kv_bytes_per_token("float32") == 0
    assert (spec.pooling is not None) == architecture.endswith("ForSequenceClassification")


def test_modernberts_layers_differ_as_transformers_says() -> None:
    spec, config = read_written("ModernBertModel", num_hidden_layers=7, local_attention=16, norm_bias=True)
    windows = [layer.attention.window for layer in spec.layers]
    kinds = [None if kind == "full_attention" else config.sliding_window + 1 for kind in config.layer_types]
    assert windows == kinds
    assert kinds[:2] == [None, 9]
    assert spec.rope == RopeConfig(theta=160_000.0)
    assert spec.layers[1].attention.rope == RopeConfig(theta=10_000.0)
    assert [layer.attention_norm for layer in spec.layers[:2]] == [None, "attn_norm"]
    assert spec.norm_bias
    assert spec.norm == "model.final_norm"


def test_modernberts_first_checkpoints_are_read_alike() -> None:
    written, config = read_written("ModernBertModel")
    old = {
        **BERT,
        "architectures": ["ModernBertModel"],
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "layer_norm_eps": 1e-05,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "norm_eps": config.norm_eps,
        "position_embedding_type": "absolute",
        "sparse_pred_ignore_index": -100,
    }
    assert read_model_spec(old) == written


@refusals("encoders")
def test_a_setting_that_is_not_computed_is_refused_by_its_key(refusal: Refusal) -> None:
    """`of`: the checkpoint of which the setting is another."""

    def read(values: dict[str, Any]) -> ModelSpec:
        own = CONFIGS[values.pop("of", "BERT")]
        return read_model_spec({"architectures": ["BertModel"], **BERT, **own, **values})

    refusal.check(read)


def test_a_decoder_without_its_language_head_is_the_same_decoder() -> None:
    sizes = {**BERT, "num_key_value_heads": 2, "model_type": "qwen3"}
    whole = read_model_spec({"architectures": ["Qwen3ForCausalLM"], **sizes})
    alone = read_model_spec({"architectures": ["Qwen3Model"], **sizes})
    assert whole.layers == alone.layers
    assert (whole.has_logits, alone.has_logits) == (True, False)
    assert alone.num_active_params == whole.num_active_params - 2 * 100 * 48


@pytest.mark.parametrize("value", [False, None])
def test_a_decoder_that_is_not_causal_is_an_encoder(value: bool | None) -> None:
    sizes = {**BERT, "num_key_value_heads": 2, "architectures": ["Qwen2ForCausalLM"], "is_causal": value}
    spec = read_model_spec(sizes)
    assert (spec.is_causal, spec.has_logits) == (False, False)
    assert spec.kv_bytes_per_token("float32") == 0
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    with pytest.raises(ModelError, match="is_causal=False: expected true for a model with attention windows"):
        read_model_spec({**sizes, **windows})


def test_an_encoders_estimates_count_what_it_has() -> None:
    spec, _ = read_written("BertModel")
    assert spec.num_active_params == 4 * (4 * 48 * 48 + 2 * 48 * 80)
    gated, _ = read_written("ModernBertModel")
    assert gated.num_active_params == 4 * (4 * 48 * 48 + 3 * 48 * 80)
    assert gated.num_activations_per_token - spec.num_activations_per_token == 80
