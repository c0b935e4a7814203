"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window on some layers where it is switched on."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = replace(read_attention(fields, num_kv_heads=32), qkv_bias=True)
    ffn = read_dense(fields)
    layers = [LayerSpec(attention=part, ffn=ffn) for part in spread_windows(fields, attention)]
    return read_model(fields, "Qwen2ForCausalLM", layers, max_positions=32768)


def spread_windows(fields: ConfigFields, attention: AttentionSpec) -> list[AttentionSpec]:
    """The attention of each layer; from max_window_layers on it slides unless layer_types says otherwise."""
    num_layers = read_num_layers(fields)
    fields.ignore("sliding_window", "max_window_layers", "layer_types")
    if not fields.boolean("use_sliding_window", False):
        return [attention] * num_layers
    window = read_window(fields, 4096)
    if window is None:
        return [attention] * num_layers
    first = fields.integer("max_window_layers", 28, low=0) if fields.get("layer_types") is None else 0
    is_sliding = read_layer_types(fields, [layer >= first for layer in range(num_layers)])
    return [replace(attention, window=window if slides else None) for slides in is_sliding]
