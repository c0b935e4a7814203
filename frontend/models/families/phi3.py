"""Phi-3 and Phi-4: Llama whose queries, keys and values are one tensor, and gate and up another.

Its only rope scaling is longrope; of Phi-4-mini three quarters of a head are rotated.
"""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers, read_window
from .rope import read_rope

_TRAINED_LEN = 4096


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = replace(read_attention(fields), window=read_window(fields, None), qkv=("self_attn.qkv_proj",))
    ffn = replace(read_dense(fields), gate="mlp.gate_up_proj", fused="gate_up")
    layers = [LayerSpec(attention=attention, ffn=ffn)] * read_num_layers(fields)
    max_positions = fields.integer("max_position_embeddings", _TRAINED_LEN)
    rope = read_rope(
        fields, max_positions, head_size=attention.head_size, has_factors=True, original=_TRAINED_LEN
    )
    return read_model(fields, "Phi3ForCausalLM", layers, max_positions, norm_eps=1e-5, rope=rope)
