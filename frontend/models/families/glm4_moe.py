"""GLM-4.5 to 4.7: part of each head is rotated, experts as in DeepSeek V3."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model
from .rope import read_rope
from .routed import read_routed_layers, skip_predicting_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    max_positions = fields.integer("max_position_embeddings", 131072)
    heads = read_attention(fields, num_kv_heads=8)
    attention = replace(
        heads,
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm="each_head" if fields.boolean("use_qk_norm", False) else None,
    )
    each = read_routed_layers(
        fields, num_experts=128, per_token=8, num_shared=1, num_dense=1, normalizes=True
    )
    return read_model(
        fields,
        "Glm4MoeForCausalLM",
        [LayerSpec(attention=attention, ffn=ffn) for ffn in each],
        max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.5),
        unused_tensors=skip_predicting_layers(fields),
    )
