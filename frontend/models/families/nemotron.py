"""Nemotron: LayerNorms that multiply by 1 + weight, half of each head is rotated, relu2 without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(rms_norm_eps="norm_eps")
    max_positions = fields.integer("max_position_embeddings", 4096)
    heads = read_attention(fields, may_have_bias=True)
    ffn = replace(read_plain(fields, activation="relu2"), bias=fields.boolean("mlp_bias", False))
    layer = LayerSpec(attention=heads, ffn=ffn)
    return read_model(
        fields,
        "NemotronForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.5),
        norm_kind="layer",
        norm_bias=True,
        norm_weight_offset=1.0,
    )


def read_jais2_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Jais2: plain norms, heads are rotated whole."""
    fields.rename(rms_norm_eps="layer_norm_eps")
    bias = fields.boolean("attention_bias", True)
    ffn = replace(read_plain(fields, activation="relu2"), bias=fields.boolean("mlp_bias", True))
    layer = LayerSpec(attention=replace(read_attention(fields), qkv_bias=bias, o_bias=bias), ffn=ffn)
    return read_model(
        fields,
        "Jais2ForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=8192,
        norm_eps=1e-5,
        norm_kind="layer",
        norm_bias=True,
    )
