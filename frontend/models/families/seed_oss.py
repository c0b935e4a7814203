"""Seed-OSS: Llama with biases on queries, keys and values, and heads of a size of their own."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    heads = read_attention(fields, num_kv_heads=8, head_size=128)
    attention = replace(
        heads,
        qkv_bias=fields.boolean("attention_bias", True),
        o_bias=fields.boolean("attention_out_bias", False),
    )
    ffn = replace(read_dense(fields), bias=fields.boolean("mlp_bias", False))
    layers = [LayerSpec(attention=attention, ffn=ffn)] * read_num_layers(fields)
    return read_model(fields, "SeedOssForCausalLM", layers, max_positions=524288)
