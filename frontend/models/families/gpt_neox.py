"""GPT-NeoX and Pythia: both parts of a layer read the same sum, each by a LayerNorm of its own."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import EmbeddingSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain
from .rope import read_rope


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(rms_norm_eps="layer_norm_eps", rope_theta="rotary_emb_base")
    fields.rename(partial_rotary_factor="rotary_pct", num_key_value_heads="num_attention_heads")
    fields.ignore("num_key_value_heads")
    max_positions = fields.integer("max_position_embeddings", 2048)
    bias, heads = fields.boolean("attention_bias", True), read_attention(fields)
    names = {"qkv": ("attention.query_key_value",), "qkv_by_group": True, "out": "attention.dense"}
    ffn = read_plain(fields, activation="gelu", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=bias, o_bias=bias, **names),
        ffn=replace(ffn, bias=True),
        is_parallel=fields.boolean("use_parallel_residual", True),
    )
    return read_model(
        fields,
        "GPTNeoXForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.25),
        norm_kind="layer",
        norm_bias=True,
        embedding=EmbeddingSpec(tokens="gpt_neox.embed_in"),
        layer_prefix="gpt_neox.layers.{}",
        norm="gpt_neox.final_layer_norm",
        optional_prefix="gpt_neox.",
        unused_tensors=("embed_out.",),  # the head's name; some parts have none
    )
