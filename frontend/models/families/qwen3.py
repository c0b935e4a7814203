"""Qwen3: Qwen2 with norms on query and key heads instead of biases."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model
from .qwen2 import spread_windows


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = read_qwen3_attention(fields, num_kv_heads=32, head_size=128)
    ffn = read_dense(fields)
    layers = [LayerSpec(attention=part, ffn=ffn) for part in spread_windows(fields, attention)]
    return read_model(fields, "Qwen3ForCausalLM", layers, max_positions=32768)


def read_qwen3_attention(fields: ConfigFields, num_kv_heads: int, head_size: int | None) -> AttentionSpec:
    """The attention of a layer without its window."""
    bias = fields.boolean("attention_bias", False)
    heads = read_attention(fields, num_kv_heads=num_kv_heads, head_size=head_size)
    return replace(heads, qkv_bias=bias, o_bias=bias, qk_norm="each_head")
