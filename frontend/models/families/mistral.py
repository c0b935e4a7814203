"""Mistral: Llama with an attention window on every layer (null in later releases)."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = replace(read_attention(fields, num_kv_heads=8), window=read_window(fields, 4096))
    layer = LayerSpec(attention=attention, ffn=read_dense(fields))
    return read_model(fields, "MistralForCausalLM", [layer] * read_num_layers(fields), max_positions=131072)
