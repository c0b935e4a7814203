"""Ministral of 2024: Mistral with a window on some layers."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    window, heads = read_window(fields, 4096), read_attention(fields, num_kv_heads=8)
    is_sliding = read_layer_types(fields, [window is not None] * read_num_layers(fields))
    layers = [
        LayerSpec(attention=replace(heads, window=window if slides else None), ffn=read_dense(fields))
        for slides in is_sliding
    ]
    return read_model(fields, "MinistralForCausalLM", layers, max_positions=131072)
