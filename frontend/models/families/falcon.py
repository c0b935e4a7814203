"""Falcon: parallel layers with LayerNorms and few heads of keys and values, all three in one tensor.

Of its generations the first has one head of keys and values, the next a norm for each part of a layer.
"""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import EmbeddingSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(rms_norm_eps="layer_norm_epsilon", intermediate_size="ffn_hidden_size")
    fields.rename(hidden_act="activation", num_key_value_heads="num_kv_heads")
    fields.only("alibi", False)
    is_new, is_single = fields.boolean("new_decoder_architecture", False), fields.boolean("multi_query", True)
    is_parallel, bias = fields.boolean("parallel_attn", True), fields.boolean("bias", False)
    heads, by_group = read_attention(fields), is_new or not is_single
    if is_new and not is_parallel:
        raise fields.error("parallel_attn", is_parallel, "true with new_decoder_architecture")
    if not is_new and not is_single and heads.num_kv_heads != heads.num_heads:
        raise fields.error("num_kv_heads", heads.num_kv_heads, f"{heads.num_heads} without multi_query")
    num_norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1, high=2 if is_new else 1)
    width = 4 * fields.integer("hidden_size")
    ffn = read_plain(fields, activation="gelu", width=width, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
    names = {"qkv": ("self_attention.query_key_value",), "out": "self_attention.dense"}
    layer = LayerSpec(
        attention=replace(
            heads,
            num_kv_heads=heads.num_kv_heads if by_group else 1,
            qkv_by_group=by_group,
            qkv_bias=bias,
            o_bias=bias,
            **names,
        ),
        ffn=replace(ffn, bias=bias),
        attention_norm="ln_attn" if num_norms == 2 else "input_layernorm",
        ffn_norm="ln_mlp" if num_norms == 2 else None if is_parallel else "post_attention_layernorm",
        is_parallel=is_parallel,
    )
    return read_model(
        fields,
        "FalconForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=2048,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        norm_kind="layer",
        norm_bias=True,
        embedding=EmbeddingSpec(tokens="transformer.word_embeddings"),
        layer_prefix="transformer.h.{}",
        norm="transformer.ln_f",
        optional_prefix="transformer.",
    )
