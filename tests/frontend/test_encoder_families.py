"""config.json of an encoder, a classifier or a reward model means what transformers means by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quire.frontend.models.families import read_model_spec
from quire.frontend.models.families.encoders import ENCODERS
from quire.ipc.errors import ModelError
from quire.ipc.spec.model_spec import DenseSpec, ModelSpec, RopeConfig
from refusals import Refusal, refusals

BERT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
DISTILBERT: dict[str, Any] = {
    "vocab_size": 100,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 4,
    "n_heads": 4,
    "max_position_embeddings": 66,
}
NOMIC: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "causal": False,
    "dense_seq_output": True,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 300,
    "n_layer": 2,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "summary_proj_to_labels": True,
    "type_vocab_size": 2,
    "use_flash_attn": True,
    "use_xentropy": True,
    "vocab_size": 100,
}
NEW: dict[str, Any] = {
    **BERT,
    "architectures": ["NewModel"],
    "model_type": "new",
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "unpad_inputs": True,
    "use_memory_efficient_attention": True,
}


def read_written(architecture: str, **values: Any) -> tuple[ModelSpec, Any]:
    """What is read of the config.json that transformers writes, and its own configuration."""
    import transformers

    sizes = DISTILBERT if architecture.startswith("Distil") else BERT
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


@pytest.mark.parametrize("architecture", ["BertModel", "DistilBertModel", "MPNetModel", "RobertaModel"])
def test_learned_positions_begin_where_the_family_has_its_first(architecture: str) -> None:
    spec, _ = read_written(architecture)
    offset = 0 if "Bert" in architecture else 2
    assert spec.embedding.position_offset == offset
    assert spec.max_position_embeddings == 66 - offset
    assert spec.rope.type == "none"
    layer = spec.layers[0]
    assert layer.norms_sum
    assert isinstance(layer.ffn, DenseSpec)
    assert not layer.ffn.is_gated
    assert layer.ffn.activation == "gelu"
    assert (spec.relative_bias is not None) == (architecture == "MPNetModel")


def test_robertas_positions_begin_behind_the_padding_tokens() -> None:
    spec, _ = read_written("XLMRobertaModel", pad_token_id=4)
    assert (spec.embedding.position_offset, spec.max_position_embeddings) == (5, 61)


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


def test_gtes_own_rotary_scaling_is_told_by_base_and_divisor() -> None:
    spec = read_model_spec(NEW)
    assert spec.rope == RopeConfig(type="linear", theta=160_000.0, factor=8 ** (2 / 12))
    assert spec.embedding.types == "new.embeddings.token_type_embeddings"
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, DenseSpec)
    assert (ffn.fused, ffn.bias, ffn.has_down_bias) == ("up_gate", False, True)
    assert read_model_spec({**NEW, "type_vocab_size": 0}).embedding.types is None


def test_nomics_own_keys_are_read() -> None:
    spec = read_model_spec(NOMIC)
    assert (spec.vocab_size, spec.max_position_embeddings) == (128, 2048)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, DenseSpec)
    assert (ffn.intermediate_size, ffn.activation, ffn.gate, ffn.up) == (512, "silu", "mlp.fc12", "mlp.fc11")
    assert spec.rope == RopeConfig(theta=1000.0)
    spec = read_model_spec(NOMIC | {"rotary_emb_base": None, "layer_norm_epsilon": None})
    assert (spec.rope, spec.norm_eps) == (RopeConfig(theta=10_000.0), 1e-5)


def test_modernberts_layers_with_windows_turn_as_the_others_where_their_base_is_null() -> None:
    config = {**BERT, "architectures": ["ModernBertModel"], "global_rope_theta": 5000.0}
    for given, theta in ({}, 1e4), ({"local_rope_theta": None}, 5e3), ({"local_rope_theta": 7.0}, 7.0):
        rope = read_model_spec(config | given).layers[1].attention.rope
        assert rope == RopeConfig(theta=theta)


@refusals("encoders")
def test_a_setting_that_is_not_computed_is_refused_by_its_key(refusal: Refusal) -> None:
    """`of`: the checkpoint of which the setting is another."""

    def read(values: dict[str, Any]) -> ModelSpec:
        own = {"": {}, "NEW": NEW, "NOMIC": NOMIC}[values.pop("of", "")]
        return read_model_spec({"architectures": ["BertModel"], **BERT, **own, **values})

    refusal.check(read)


CLASSIFIERS = {
    "BertForSequenceClassification": ["bert.pooler.dense tanh", "classifier identity"],
    "RobertaForSequenceClassification": ["classifier.dense tanh", "classifier.out_proj identity"],
    "DistilBertForSequenceClassification": ["pre_classifier relu", "classifier identity"],
    "MPNetForSequenceClassification": ["classifier.dense tanh", "classifier.out_proj identity"],
    "ModernBertForSequenceClassification": ["head.dense gelu", "classifier identity"],
    "GteForSequenceClassification": ["gte.pooler.dense tanh", "classifier identity"],
    "Qwen3ForSequenceClassification": ["score identity"],
    "LlamaForSequenceClassification": ["score identity"],
}


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_classifier_has_its_familys_layers(architecture: str) -> None:
    spec, _ = read_written(architecture, num_labels=3)
    head = spec.pooling
    assert head is not None
    assert [f"{each.name} {each.activation}" for each in head.projections] == CLASSIFIERS[architecture]
    assert (head.num_labels, head.projections[-1].out_size, head.activation) == (3, 3, "softmax")
    assert head.pools == ("last" if spec.is_causal else "cls",)
    assert head.tasks == ("classify", "token_classify")
    assert not spec.has_logits


def test_reward_heads_score_each_token() -> None:
    for architecture, count in (("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)):
        head = read_model_spec({"architectures": [architecture], **BERT, "num_key_value_heads": 2}).pooling
        assert head is not None
        assert (head.pools, head.num_labels, head.tasks) == (("all",), count, ("token_classify",))
        assert [each.name for each in head.projections] == ["score.0", "score.2"]


SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid"),
        ({}, "softmax"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": SIGMOID, "problem_type": "regression"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}, "problem_type": "regression"}, "sigmoid"),
    ],
    ids=str,
)
def test_what_makes_probabilities_is_the_checkpoints(values: dict[str, Any], activation: str) -> None:
    spec = read_model_spec({"architectures": ["BertForSequenceClassification"], **BERT, **values})
    assert spec.pooling is not None
    assert spec.pooling.activation == activation


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
    with pytest.raises(ModelError, match="is_causal=False: true for a model with attention windows"):
        read_model_spec({**sizes, **windows})


def test_an_encoders_estimates_count_what_it_has() -> None:
    spec, _ = read_written("BertModel")
    assert spec.num_active_params == 4 * (4 * 48 * 48 + 2 * 48 * 80)
    gated, _ = read_written("ModernBertModel")
    assert gated.num_active_params == 4 * (4 * 48 * 48 + 3 * 48 * 80)
    assert gated.num_activations_per_token - spec.num_activations_per_token == 80
