"""GPT-2: LayerNorms, biases, learned positions; its linear layers are stored by input."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import EmbeddingSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain

_ONLY = {"reorder_and_upcast_attn": False, "scale_attn_by_inverse_layer_idx": False}


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    for key, only in _ONLY.items():
        fields.only(key, only)
    return read_gpt2(fields, "GPT2LMHeadModel", activation="gelu_new")


def read_gpt2(fields: ConfigFields, architecture: str, activation: str) -> ModelSpec:
    """The model of an `architecture` with these layers; `activation` is its default."""
    fields.rename(hidden_size="n_embd", max_position_embeddings="n_positions", num_attention_heads="n_head")
    fields.rename(num_hidden_layers="n_layer", intermediate_size="n_inner", hidden_act="activation_function")
    fields.rename(rms_norm_eps="layer_norm_epsilon", num_key_value_heads="n_head")
    for key, only in {"add_cross_attention": False, "scale_attn_weights": True}.items():
        fields.only(key, only)
    heads = read_attention(fields)
    width = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    ffn = read_plain(fields, width=width, activation=activation, up="mlp.c_fc", down="mlp.c_proj")
    names = {"qkv": ("attn.c_attn",), "out": "attn.c_proj"}
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=True, o_bias=True, **names),
        ffn=replace(ffn, bias=True),
        attention_norm="ln_1",
        ffn_norm="ln_2",
    )
    return read_model(
        fields,
        architecture,
        [layer] * read_num_layers(fields),
        max_positions=1024,
        norm_eps=1e-5,
        rope=RopeConfig(type="none"),
        tie_word_embeddings=True,
        norm_kind="layer",
        norm_bias=True,
        embedding=EmbeddingSpec(tokens="transformer.wte", positions="transformer.wpe"),
        layer_prefix="transformer.h.{}",
        norm="transformer.ln_f",
        optional_prefix="transformer.",
        transposed_linears=True,
    )
