"""Llama 2 and 3, and the many models of that shape."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    layer = LayerSpec(
        attention=read_attention(fields, may_have_bias=True),
        ffn=replace(read_dense(fields), bias=fields.boolean("mlp_bias", False)),
    )
    return read_model(fields, "LlamaForCausalLM", [layer] * read_num_layers(fields), max_positions=2048)
