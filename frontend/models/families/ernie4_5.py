"""ERNIE 4.5, the dense models: Llama that rotates neighbours, with biases everywhere or nowhere."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("weight_share_add_bias")  # of its maker's own code
    max_positions = fields.integer("max_position_embeddings", 131072)
    bias = fields.boolean("use_bias", False)
    heads = read_attention(fields, num_kv_heads=2, head_size=128)
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=bias, o_bias=bias), ffn=replace(read_dense(fields), bias=bias)
    )
    return read_model(
        fields,
        "Ernie4_5ForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=replace(read_rope(fields, max_positions, 500_000.0), is_interleaved=True),
        tie_word_embeddings=True,
    )
