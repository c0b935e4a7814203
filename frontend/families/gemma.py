"""Gemma: Llama with norms that multiply by 1 + weight and embeddings scaled by the root of their size.

See arXiv 2403.08295, section 2; later generations have families of their own.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...ipc.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("hidden_activation")  # older exports have it beside hidden_act, which transformers reads
    bias = fields.boolean("attention_bias", False)
    attention = read_attention(fields, num_kv_heads=16, head_size=256)
    ffn = read_dense(fields, activation="gelu_pytorch_tanh")
    if ffn.activation == "gelu":  # which the first exports say, and mean the approximation
        ffn = replace(ffn, activation="gelu_tanh")
    layer = LayerSpec(attention=replace(attention, qkv_bias=bias, o_bias=bias), ffn=ffn)
    return read_model(
        fields,
        "GemmaForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=8192,
        tie_word_embeddings=True,
        norm_weight_offset=1.0,
        norm_rounds_normed=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
    )
