"""ModernBERT: norms before the parts, two rotary bases, windows on most layers (arXiv 2412.13663)."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from .....ipc.spec.model_spec import (
    DenseSpec,
    EmbeddingSpec,
    LayerSpec,
    ModelSpec,
    Pool,
    ProjectionSpec,
    RopeConfig,
)
from ..config_fields import ConfigFields
from ..heads import make_classifier
from ..parts import read_layer_types, read_num_layers
from .parts import read_encoder, read_encoder_activation, read_heads

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Key of older checkpoints, and the base where nothing is said.
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}
_CLASSIFIER_POOLS: tuple[Pool, ...] = ("cls", "mean")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    fields.ignore("layer_norm_eps", "position_embedding_type")  # beside norm_eps and rope in published ones
    fields.ignore("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index")  # of the language head
    fields.ignore("classifier_bias", "classifier_activation", "classifier_pooling")
    num_layers = read_num_layers(fields)
    every = fields.integer("global_attn_every_n_layers", 3)
    is_sliding = read_layer_types(fields, [layer % every != 0 for layer in range(num_layers)])
    ropes = {kind: _read_rope(fields, kind) for kind in (_FULL, _SLIDING)}
    return read_encoder(
        fields,
        "model.",
        _read_layers(fields, is_sliding, ropes[_SLIDING]),
        max_positions=fields.integer("max_position_embeddings", 8192),
        embedding=EmbeddingSpec(tokens="model.embeddings.tok_embeddings", norm="model.embeddings.norm"),
        layer_prefix="model.layers.{}",
        unused=("head.", "decoder."),
        norm_eps=fields.number("norm_eps", 1e-5),
        norm_bias=fields.boolean("norm_bias", False),
        norm="model.final_norm",
        rope=ropes[_FULL],
    )


def read_classifier(fields: ConfigFields) -> ModelSpec:
    """The encoder with a classifier on its first token or the mean of all."""
    spec = read_spec(fields)
    pool = fields.get("classifier_pooling", "cls")
    if pool not in _CLASSIFIER_POOLS:
        raise fields.error("classifier_pooling", pool, f"one of {', '.join(_CLASSIFIER_POOLS)}")
    dense = ProjectionSpec(
        name="head.dense",
        in_size=spec.hidden_size,
        out_size=spec.hidden_size,
        bias=fields.boolean("classifier_bias", False),
        activation=read_encoder_activation(fields, "classifier_activation"),
        norm="head.norm",
    )
    head = make_classifier(fields, pool, "classifier", dense, hidden_size=spec.hidden_size)
    return replace(spec, pooling=head)


def _read_layers(fields: ConfigFields, is_sliding: list[bool], rope: RopeConfig) -> list[LayerSpec]:
    bias = fields.boolean("attention_bias", False)
    full = replace(read_heads(fields), qkv=("attn.Wqkv",), out="attn.Wo", qkv_bias=bias, o_bias=bias)
    # Half of local_attention to each side, and the token itself.
    window = fields.integer("local_attention", 128) // 2 + 1
    sliding = replace(full, window=window, rope=rope)
    ffn = DenseSpec(
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_encoder_activation(fields, "hidden_activation"),
        bias=fields.boolean("mlp_bias", False),
        gate="mlp.Wi",
        fused="gate_up",
        down="mlp.Wo",
    )
    return [
        LayerSpec(
            attention=sliding if slides else full,
            ffn=ffn,
            attention_norm="attn_norm" if index else None,  # the embeddings have theirs
            ffn_norm="mlp_norm",
        )
        for index, slides in enumerate(is_sliding)
    ]


def _read_rope(fields: ConfigFields, kind: str) -> RopeConfig:
    """The rotary embedding of one kind of layer: an object a kind, or a key a kind in older checkpoints."""
    key, default = _THETAS[kind]
    if kind == _SLIDING and key in fields and fields.get(key) is None:
        key, default = _THETAS[_FULL]  # as transformers 4 read it
    theta = fields.number(key, default, low=1.0)
    if fields.get("rope_scaling"):
        raise fields.error("rope_scaling", fields.get("rope_scaling"), "null")
    objects: Any = fields.get("rope_parameters", {})
    values: Any = cast(dict[str, Any], objects).get(kind, {}) if isinstance(objects, dict) else None
    if not isinstance(values, dict):
        raise fields.error("rope_parameters", objects, f"an object with {_FULL!r} and {_SLIDING!r}")
    rope = ConfigFields(cast(dict[str, Any], values), f"rope_parameters.{kind}.")
    rope.only("rope_type", "default")
    theta = rope.number("rope_theta", theta, low=1.0)
    rope.check_rest("ModernBERT's rope")
    return RopeConfig(theta=theta)
