"""OLMo 2: norms after attention and feed-forward instead of before, and of all queries and keys of a token.

All are rounded once, after the weight (arXiv 2501.00656, section 2.1).
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
    return read_olmo(fields, "Olmo2ForCausalLM", [read_layer(fields)] * read_num_layers(fields))


def read_layer(fields: ConfigFields) -> LayerSpec:
    """A layer of this generation and the next."""
    return LayerSpec(
        attention=replace(read_attention(fields, may_have_bias=True), qk_norm="all_heads"),
        ffn=read_dense(fields),
        attention_norm=None,
        attention_out_norm="post_attention_layernorm",
        ffn_norm=None,
        ffn_out_norm="post_feedforward_layernorm",
    )


def read_olmo(
    fields: ConfigFields, architecture: str, layers: Sequence[LayerSpec], **others: Any
) -> ModelSpec:
    """The model of such layers."""
    return read_model(
        fields, architecture, layers, max_positions=2048, norm_eps=1e-5, norm_rounds_normed=False, **others
    )
