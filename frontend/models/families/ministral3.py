"""Ministral 3: Mistral with YaRN, whose queries are scaled beyond the trained length."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers, read_window
from .rope import read_rope

_ROPE = RopeConfig(
    type="yarn",
    theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    mscale=1.0,
    mscale_all_dim=1.0,
    query_scale_beta=0.1,
)


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    max_positions = fields.integer("max_position_embeddings", 262144)
    heads = read_attention(fields, num_kv_heads=8, head_size=128)
    layer = LayerSpec(attention=replace(heads, window=read_window(fields, None)), ffn=read_dense(fields))
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    return read_model(
        fields,
        "Ministral3ForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, max_positions, scales_queries=True) if has_rope else _ROPE,
    )
