"""Alibaba's GTE encoders, of model_type "new" (or "gte"): BERT with rotary positions and gated parts."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from .....ipc.spec.model_spec import DenseSpec, LayerSpec, ModelSpec, RopeConfig
from ..config_fields import ConfigFields
from ..parts import read_num_layers
from .parts import name_embeddings, read_encoder, read_encoder_activation, read_heads, read_static_rope

# The last one weighs tokens for sparse vectors, in checkpoints that have both.
_UNUSED = ("pooler.", "lm_head.", "embeddings.position_ids", "classifier.")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The encoder of config.json."""
    is_ported = fields.get("model_type") == "gte"  # transformers' own class, with other defaults
    prefix = "gte." if is_ported else "new."
    _check_variant(fields)
    attention = replace(
        read_heads(fields),
        qkv_bias=True,
        o_bias=True,
        qkv=("attention.qkv_proj",),
        out="attention.o_proj",
    )
    ffn = DenseSpec(
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_encoder_activation(fields),
        down_bias=True,
        gate="mlp.up_gate_proj",
        fused="up_gate",
        down="mlp.down_proj",
    )
    layer = LayerSpec(
        attention=attention, ffn=ffn, attention_norm="attn_ln", ffn_norm="mlp_ln", norms_sum=True
    )
    max_positions = fields.integer("max_position_embeddings", 8192 if is_ported else 2048)
    num_types = fields.integer("type_vocab_size", 1, low=0)
    return read_encoder(
        fields,
        prefix,
        [layer] * read_num_layers(fields),
        max_positions=max_positions,
        embedding=replace(name_embeddings(prefix, num_types=num_types), positions=None),
        layer_prefix=f"{prefix}encoder.layer.{{}}",
        unused=_UNUSED,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        rope=_read_rope(fields, attention.head_size, max_positions, 160_000.0 if is_ported else 10_000.0),
    )


def _check_variant(fields: ConfigFields) -> None:
    """Refuse the settings of the model's code that no published checkpoint uses."""
    fields.ignore("use_memory_efficient_attention", "logn_attention_clip1")  # speed; a part of the last below
    fields.only("pack_qkv", True)
    fields.only("layer_norm_type", "layer_norm")
    fields.only("position_embedding_type", "rope")
    fields.only("logn_attention_scale", False)


def _read_rope(fields: ConfigFields, head_size: int, max_positions: int, theta: float) -> RopeConfig:
    """As of decoders, and "ntk": the base times the factor, all angles divided by factor ** (2 / head_size).

    The second is "linear" with that divisor.
    """
    scaling: Any = fields.get("rope_scaling")
    if not isinstance(scaling, dict) or "ntk" not in cast(dict[str, Any], scaling).values():
        return read_static_rope(fields, max_positions, theta)
    values = ConfigFields(cast(dict[str, Any], scaling), "rope_scaling.")
    values.ignore("type", "rope_type")
    factor = values.number("factor", low=1.0)
    values.check_rest("rope_type 'ntk'")
    values.only("mixed_b", None)
    base = fields.number("rope_theta", theta, low=1.0)
    return RopeConfig(type="linear", theta=base * factor, factor=factor ** (2 / head_size))
