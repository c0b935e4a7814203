"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in some."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mamba2 import read_mamba2
from .parts import read_attention, read_dense, read_model, read_num_layers
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    # transformers takes half of each head whatever is said, and all logits.
    fields.ignore("partial_rotary_factor", "num_logits_to_keep")
    attention = read_attention(fields, num_kv_heads=8, may_have_bias=True)
    indexes, positions = (
        fields.get("attn_layer_indices", []),
        fields.integer("max_position_embeddings", 262144),
    )
    ffn = replace(
        read_dense(fields),
        bias=fields.boolean("mlp_bias", False),
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
    )
    recurrent = LayerSpec(recurrent=read_mamba2(fields), ffn=ffn, ffn_norm="pre_ff_layernorm")
    layers = [
        LayerSpec(attention=attention, ffn=ffn, ffn_norm="pre_ff_layernorm")
        if index in indexes
        else recurrent
        for index in range(read_num_layers(fields))
    ]
    return read_model(
        fields,
        "BambaForCausalLM",
        layers,
        positions,
        norm_eps=1e-5,
        norm="model.final_layernorm",
        rope=read_rope(fields, positions, head_size=attention.head_size, rotated_share=0.5),
    )
