"""Gemma: Llama with norms that multiply by 1 + weight and embeddings scaled by the root of their size.

See arXiv 2403.08295, section 2; later generations have families of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_attention, read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("hidden_activation")  # older exports have it beside hidden_act, which transformers reads
    attention = read_attention(fields, num_kv_heads=16, head_size=256, may_have_bias=True)
    ffn = read_dense(fields, activation="gelu_pytorch_tanh")
    if ffn.activation == "gelu":  # which the first exports say, and mean the approximation
        ffn = replace(ffn, activation="gelu_tanh")
    layer = LayerSpec(attention=attention, ffn=ffn)
    return read_gemma(fields, "GemmaForCausalLM", [layer] * read_num_layers(fields), max_positions=8192)


def read_gemma(
    fields: ConfigFields, architecture: str, layers: Sequence[LayerSpec], max_positions: int, **others: Any
) -> ModelSpec:
    """As `read_model`, with what all generations of Gemma share."""
    return read_model(
        fields,
        architecture,
        layers,
        max_positions,
        tie_word_embeddings=True,
        norm_weight_offset=1.0,
        norm_rounds_normed=False,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        **others,
    )
