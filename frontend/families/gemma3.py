"""Gemma 3, the text model: Gemma 2 with norms of query and key heads in the place of soft caps.

Five layers have a window for one without, and each kind its own rotation (arXiv 2503.19786, section 2).
"""

from __future__ import annotations

from msgspec.structs import replace

from ...ipc.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window
from .rope import read_ropes_by_kind

_PATTERN = 6
_MAX_POSITIONS = 131_072


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", True, "false, as models that generate have it")
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    pattern = fields.integer("_sliding_window_pattern", fields.integer("sliding_window_pattern", _PATTERN))
    is_sliding = read_layer_types(fields, [(layer + 1) % pattern != 0 for layer in range(num_layers)])
    bias = fields.boolean("attention_bias", False)
    max_positions = fields.integer("max_position_embeddings", _MAX_POSITIONS)
    rope, sliding_rope = read_ropes_by_kind(fields, max_positions, 1e6, 1e4)
    attention = replace(
        read_attention(fields, num_kv_heads=4, head_size=256),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=fields.optional_number("attn_logit_softcapping", None),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="each_head",
    )
    sliding = replace(attention, window=window, rope=None if sliding_rope == rope else sliding_rope)
    ffn = read_dense(fields, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    layers = [
        LayerSpec(
            attention=sliding if slides else attention,
            ffn=ffn,
            attention_out_norm="post_attention_layernorm",
            ffn_norm="pre_feedforward_layernorm",
            ffn_out_norm="post_feedforward_layernorm",
        )
        for slides in is_sliding
    ]
    return read_model(
        fields,
        "Gemma3ForCausalLM",
        layers,
        max_positions=_MAX_POSITIONS,
        rope=rope,
        tie_word_embeddings=True,
        norm_weight_offset=1.0,
        norm_rounds_normed=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping", None),
    )
