"""Arcee: Llama whose feed-forward part is relu squared, without a gate."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    ffn = replace(read_plain(fields, activation="relu2"), bias=fields.boolean("mlp_bias", False))
    layer = LayerSpec(attention=read_attention(fields, may_have_bias=True), ffn=ffn)
    layers = [layer] * read_num_layers(fields)
    return read_model(fields, "ArceeForCausalLM", layers, max_positions=4096, norm_eps=1e-5)
