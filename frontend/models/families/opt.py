"""OPT: LayerNorms, biases, learned positions that begin at the table's third row."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import EmbeddingSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers, read_plain

_PREFIX = "model.decoder."
_EPS = 1e-5  # a constant of its code
_ONLY = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.rename(intermediate_size="ffn_dim", hidden_act="activation_function")
    fields.rename(num_key_value_heads="num_attention_heads")
    for key, only in _ONLY.items():
        fields.only(key, only)
    fields.only("word_embed_proj_dim", fields.integer("hidden_size"))
    fields.only("rms_norm_eps", _EPS)
    heads = read_attention(fields)
    bias = fields.boolean("enable_bias", True)
    ffn = read_plain(fields, activation="relu", up="fc1", down="fc2")
    layer = LayerSpec(
        attention=replace(heads, qkv_bias=bias, o_bias=bias, out="self_attn.out_proj"),
        ffn=replace(ffn, bias=bias),
        attention_norm="self_attn_layer_norm",
        ffn_norm="final_layer_norm",
    )
    return read_model(
        fields,
        "OPTForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=2048,
        norm_eps=_EPS,
        rope=RopeConfig(type="none"),
        tie_word_embeddings=True,
        norm_kind="layer",
        norm_bias=True,
        embedding=EmbeddingSpec(
            tokens=f"{_PREFIX}embed_tokens", positions=f"{_PREFIX}embed_positions", position_offset=2
        ),
        layer_prefix=_PREFIX + "layers.{}",
        norm=f"{_PREFIX}final_layer_norm",
    )
