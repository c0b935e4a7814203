"""Helium: Llama that rotates neighbours, whose norms are rounded once, after the weight."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    max_positions = fields.integer("max_position_embeddings", 4096)
    heads = read_attention(fields, num_kv_heads=20, head_size=128)
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=fields.boolean("attention_bias", False)),
        ffn=replace(read_dense(fields), bias=fields.boolean("mlp_bias", False)),
    )
    return read_model(
        fields,
        "HeliumForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-8,
        rope=replace(read_rope(fields, max_positions, 100_000.0), is_interleaved=True),
        norm_rounds_normed=False,
    )
