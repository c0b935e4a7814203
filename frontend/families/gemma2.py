"""Gemma 2: norms on both sides of attention and feed-forward, soft caps, a window on every other layer.

Its norms multiply by 1 + weight, its embeddings by the root of their size (arXiv 2408.00118, section 2).
"""

from __future__ import annotations

from msgspec.structs import replace

from ...ipc.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("hidden_act")  # older exports have it beside hidden_activation, which counts
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    is_sliding = read_layer_types(fields, [layer % 2 == 0 for layer in range(num_layers)])
    bias = fields.boolean("attention_bias", False)
    attention = replace(
        read_attention(fields, num_kv_heads=4, head_size=256),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=fields.optional_number("attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        o_bias=bias,
    )
    ffn = read_dense(fields, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    layers = [
        LayerSpec(
            attention=replace(attention, window=window if slides else None),
            ffn=ffn,
            attention_out_norm="post_attention_layernorm",
            ffn_norm="pre_feedforward_layernorm",
            ffn_out_norm="post_feedforward_layernorm",
        )
        for slides in is_sliding
    ]
    return read_model(
        fields,
        "Gemma2ForCausalLM",
        layers,
        max_positions=8192,
        tie_word_embeddings=True,
        norm_weight_offset=1.0,
        norm_rounds_normed=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping", 30.0),
    )
