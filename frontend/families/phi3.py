"""Phi-3 and Phi-4: Llama whose queries, keys and values are one tensor, and gate and up another.

The long-context variants (rope type longrope) and Phi-4-mini (part of a head is rotated) are refused by name.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...ipc.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = replace(read_attention(fields), window=read_window(fields, None), qkv=("self_attn.qkv_proj",))
    ffn = replace(read_dense(fields), gate="mlp.gate_up_proj", fused="gate_up")
    layer = LayerSpec(attention=attention, ffn=ffn)
    return read_model(
        fields, "Phi3ForCausalLM", [layer] * read_num_layers(fields), max_positions=4096, norm_eps=1e-5
    )
