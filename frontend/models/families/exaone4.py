"""EXAONE 4: norms after attention and feed-forward instead of before, and of each head.

Where some layers have a window, the others rotate nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    is_sliding = _read_sliding(fields, num_layers, window)
    heads = replace(read_attention(fields, num_kv_heads=32), qk_norm="each_head")
    full = heads if window is None else replace(heads, rope=RopeConfig(type="none"))
    layer = LayerSpec(
        attention=full,
        ffn=read_dense(fields),
        attention_norm=None,
        attention_out_norm="post_attention_layernorm",
        ffn_norm=None,
        ffn_out_norm="post_feedforward_layernorm",
    )
    sliding = replace(layer, attention=replace(heads, window=window))
    layers = [sliding if slides else layer for slides in is_sliding]
    return read_model(fields, "Exaone4ForCausalLM", layers, max_positions=2048, norm_eps=1e-5)


def _read_sliding(fields: ConfigFields, num_layers: int, window: int | None) -> list[bool]:
    if fields.get("layer_types") is not None or window is None:
        fields.ignore("sliding_window_pattern")  # which may then be a word such as LLLG
        return read_layer_types(fields, [False] * num_layers)
    pattern = fields.integer("sliding_window_pattern", 4)
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
