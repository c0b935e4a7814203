"""SmolLM3: Llama that rotates nothing on every fourth layer, where alone it may have a window."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window

_NO_ROPE = RopeConfig(type="none")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = read_attention(fields, num_kv_heads=4, may_have_bias=True)
    ffn = replace(read_dense(fields), bias=fields.boolean("mlp_bias", False))
    is_rotated, window = _read_rotated(fields), read_window(fields, None)
    is_sliding = read_layer_types(fields, [not rotated for rotated in is_rotated])
    if not fields.boolean("use_sliding_window", False):
        window = None
    layers = [
        replace(attention, rope=None if rotated else _NO_ROPE, window=window if slides else None)
        for rotated, slides in zip(is_rotated, is_sliding, strict=True)
    ]
    return read_model(
        fields,
        "SmolLM3ForCausalLM",
        [LayerSpec(attention=each, ffn=ffn) for each in layers],
        max_positions=32768,
        rope_theta=2e6,
        tie_word_embeddings=True,
    )


def _read_rotated(fields: ConfigFields) -> list[bool]:
    """Which layers rotate queries and keys."""
    num_layers, step = read_num_layers(fields), fields.integer("no_rope_layer_interval", 4)
    flags: Any = fields.get("no_rope_layers", [(layer + 1) % step != 0 for layer in range(num_layers)])
    is_list = isinstance(flags, list) and all(flag in (0, 1) for flag in cast(list[Any], flags))
    if not is_list or len(flags) < num_layers:
        raise fields.error("no_rope_layers", flags, f"a list of 0 and 1, at least {num_layers} of them")
    return [flag == 1 for flag in flags[:num_layers]]
