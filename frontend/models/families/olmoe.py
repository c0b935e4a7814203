"""OLMoE: Llama with norms of all queries and keys of a token, and experts. FlexOlmo: OLMo 2 with experts."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_activation, read_attention, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """OLMoE."""
    fields.only("clip_qkv", None)
    layer = _read_layer(fields, num_experts=64, per_token=8)
    layers = [layer] * read_num_layers(fields)
    return read_model(fields, "OlmoeForCausalLM", layers, max_positions=4096, norm_eps=1e-5)


def read_flex_spec(fields: ConfigFields) -> ModelSpec:
    """FlexOlmo."""
    layer = replace(
        _read_layer(fields, num_experts=7, per_token=5),
        attention_norm=None,
        attention_out_norm="post_attention_layernorm",
        ffn_norm=None,
        ffn_out_norm="post_feedforward_layernorm",
    )
    layers = [layer] * read_num_layers(fields)
    return read_model(
        fields,
        "FlexOlmoForCausalLM",
        layers,
        max_positions=4096,
        rope_theta=500000.0,
        norm_rounds_normed=False,
    )


def _read_layer(fields: ConfigFields, num_experts: int, per_token: int) -> LayerSpec:
    """The numbers are the family's defaults."""
    num_experts, num_experts_per_tok = read_num_experts(fields, default=num_experts, per_token=per_token)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_activation(fields),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
    )
    attention = replace(read_attention(fields, may_have_bias=True), qk_norm="all_heads")
    return LayerSpec(attention=attention, ffn=experts)
