"""Solar Open: Llama's attention, experts as in DeepSeek V3 in every layer."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model
from .routed import read_routed_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("intermediate_size", "first_k_dense_replace")  # of dense layers, which there are none
    has_bias = fields.boolean("attention_bias", False)
    attention = replace(read_attention(fields, num_kv_heads=8, head_size=128), qkv_bias=has_bias)
    each = read_routed_layers(
        fields, num_experts=128, per_token=8, num_shared=1, num_dense=None, normalizes=True
    )
    layers = [LayerSpec(attention=attention, ffn=ffn) for ffn in each]
    return read_model(
        fields, "SolarOpenForCausalLM", layers, max_positions=131072, norm_eps=1e-5, rope_theta=1e6
    )
