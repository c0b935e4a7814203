"""dots.llm1: Qwen3's attention, a window on its last layers if it has one, experts as in DeepSeek V3."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_layer_types, read_model, read_num_layers, read_window
from .qwen3 import read_qwen3_attention
from .routed import read_routed_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = read_qwen3_attention(fields, num_kv_heads=32, head_size=None)
    window, first = read_window(fields, 4096), fields.integer("max_window_layers", 62, low=0)
    is_sliding = [window is not None and layer >= first for layer in range(read_num_layers(fields))]
    layers = [
        LayerSpec(attention=replace(attention, window=window if slides else None), ffn=ffn)
        for slides, ffn in zip(read_layer_types(fields, is_sliding), read_routed_layers(fields), strict=True)
    ]
    return read_model(fields, "Dots1ForCausalLM", layers, max_positions=2048)
