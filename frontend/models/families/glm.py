"""GLM-4 of 2024 and of 0414: half of each head is rotated, by neighbours; gate and up are one tensor.

The later one has norms on both sides of attention and feed-forward, and is called Glm4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    return _read(fields, "GlmForCausalLM", LayerSpec)


def read_spec_0414(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Glm4."""
    four_norms = partial(
        LayerSpec, attention_out_norm="post_self_attn_layernorm", ffn_out_norm="post_mlp_layernorm"
    )
    return _read(fields, "Glm4ForCausalLM", four_norms)


def _read(fields: ConfigFields, architecture: str, make_layer: Callable[..., LayerSpec]) -> ModelSpec:
    max_positions = fields.integer("max_position_embeddings", 131072)
    heads = read_attention(fields, num_kv_heads=2, head_size=128)
    rope = read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.5)
    layer = make_layer(
        attention=replace(heads, qkv_bias=fields.boolean("attention_bias", True)),
        ffn=replace(read_dense(fields), gate="mlp.gate_up_proj", fused="gate_up"),
    )
    return read_model(
        fields,
        architecture,
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1.5625e-07,
        rope=replace(rope, is_interleaved=True),
    )
