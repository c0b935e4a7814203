"""Gemma 2: norms on both sides of attention and feed-forward, soft caps, a window on every other layer.

Its norms multiply by 1 + weight, its embeddings by the root of their size (arXiv 2408.00118, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .gemma import read_gemma
from .parts import read_attention, read_dense, read_layer_types, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    return read_four_norms(
        fields, "Gemma2ForCausalLM", _read_windows(fields), max_positions=8192, soft_cap=30.0
    )


def read_vault_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class VaultGemma, whose parts have no norm after them."""
    each = _read_windows(fields)
    spec = read_four_norms(fields, "VaultGemmaForCausalLM", each, max_positions=8192, soft_cap=30.0)
    layers = [replace(layer, attention_out_norm=None, ffn_out_norm=None) for layer in spec.layers]
    return replace(spec, layers=tuple(layers))


def _read_windows(fields: ConfigFields) -> list[AttentionSpec]:
    fields.ignore("hidden_act")  # older exports have it beside hidden_activation, which counts
    num_layers, window = read_num_layers(fields), read_window(fields, 4096)
    is_sliding = read_layer_types(fields, [layer % 2 == 0 for layer in range(num_layers)])
    attention = read_scaled_attention(fields, soft_cap=50.0)
    return [replace(attention, window=window if slides else None) for slides in is_sliding]


def read_scaled_attention(fields: ConfigFields, soft_cap: float | None) -> AttentionSpec:
    """Heads with a scale and a cap of their own; `soft_cap` is the family's default."""
    return replace(
        read_attention(fields, num_kv_heads=4, head_size=256, may_have_bias=True),
        scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=fields.optional_number("attn_logit_softcapping", soft_cap, tests_truth=False),
    )


def read_four_norms(
    fields: ConfigFields,
    architecture: str,
    attention: Sequence[AttentionSpec],
    max_positions: int,
    soft_cap: float | None,
    **others: Any,
) -> ModelSpec:
    """The model whose layers, with this `attention` each, have a norm before and after both of their parts.

    `soft_cap`, of the logits, is the family's default; `others` are as for `read_model`.
    """
    ffn = read_dense(fields, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    layers = [
        LayerSpec(
            attention=part,
            ffn=ffn,
            attention_out_norm="post_attention_layernorm",
            ffn_norm="pre_feedforward_layernorm",
            ffn_out_norm="post_feedforward_layernorm",
        )
        for part in attention
    ]
    cap = fields.optional_number("final_logit_softcapping", soft_cap, tests_truth=False)
    return read_gemma(fields, architecture, layers, max_positions, logit_soft_cap=cap, **others)
