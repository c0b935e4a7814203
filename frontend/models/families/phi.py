"""Phi-1, 1.5 and 2: both parts of a layer read one LayerNorm, half of a head is rotated, all have biases."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(rms_norm_eps="layer_norm_eps")
    fields.only("qk_layernorm", False)
    max_positions = fields.integer("max_position_embeddings", 2048)
    heads = read_attention(fields)
    ffn = read_plain(fields, activation="gelu_new", up="mlp.fc1", down="mlp.fc2")
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=True, o_bias=True, out="self_attn.dense"),
        ffn=replace(ffn, bias=True),
        ffn_norm=None,
        is_parallel=True,
    )
    return read_model(
        fields,
        "PhiForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.5),
        norm_kind="layer",
        norm_bias=True,
        norm="model.final_layernorm",
        lm_head_bias=True,
    )
