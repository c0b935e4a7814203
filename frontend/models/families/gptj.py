"""GPT-J: both parts of a layer read one LayerNorm, neighbours of a head's first numbers are rotated."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import EmbeddingSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(hidden_size="n_embd", max_position_embeddings="n_positions", num_attention_heads="n_head")
    fields.rename(num_hidden_layers="n_layer", intermediate_size="n_inner", hidden_act="activation_function")
    fields.rename(rms_norm_eps="layer_norm_epsilon", num_key_value_heads="n_head")
    heads = read_attention(fields)
    rotated = fields.integer("rotary_dim", 64, high=heads.head_size)
    if rotated % 2:
        raise fields.error("rotary_dim", rotated, "an even number (rotary embedding turns pairs)")
    width = 4 * fields.integer("hidden_size")
    ffn = read_plain(fields, width=width, activation="gelu_new", up="mlp.fc_in", down="mlp.fc_out")
    names = {"qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "out": "attn.out_proj"}
    layer = LayerSpec(
        attention=replace(heads, **names),
        ffn=replace(ffn, bias=True),
        attention_norm="ln_1",
        ffn_norm=None,
        is_parallel=True,
    )
    return read_model(
        fields,
        "GPTJForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=2048,
        norm_eps=1e-5,
        rope=RopeConfig(rotated_size=None if rotated == heads.head_size else rotated, is_interleaved=True),
        norm_kind="layer",
        norm_bias=True,
        embedding=EmbeddingSpec(tokens="transformer.wte"),
        layer_prefix="transformer.h.{}",
        norm="transformer.ln_f",
        optional_prefix="transformer.",
        lm_head_bias=True,
    )
