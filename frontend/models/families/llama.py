"""Llama 2 and 3, and the many models of that shape."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import (
    read_attention,
    read_dense,
    read_layer_types,
    read_model,
    read_num_layers,
    read_window,
)

_CWM_ROPE = RopeConfig(theta=1e6, type="llama3", factor=16.0, original_max_position_embeddings=8192)


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    layer = _read_layer(fields)
    return read_model(fields, "LlamaForCausalLM", [layer] * read_num_layers(fields), max_positions=2048)


def read_cwm_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Cwm, which has a window on three layers of four."""
    fields.only("attention_bias", False)
    num_layers, window = read_num_layers(fields), read_window(fields, 8192)
    layer = _read_layer(fields, num_kv_heads=8, head_size=128)
    sliding = replace(layer, attention=replace(layer.attention, window=window))
    is_sliding = read_layer_types(fields, [index % 4 != 0 for index in range(num_layers)])
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    return read_model(
        fields,
        "CwmForCausalLM",
        [sliding if slides else layer for slides in is_sliding],
        max_positions=131072,
        norm_eps=1e-5,
        rope_theta=1e6,
        rope=None if has_rope else _CWM_ROPE,
    )


def _read_layer(fields: ConfigFields, **defaults: int) -> LayerSpec:
    return LayerSpec(
        attention=read_attention(fields, may_have_bias=True, **defaults),
        ffn=replace(read_dense(fields), bias=fields.boolean("mlp_bias", False)),
    )
