"""Qwen3-MoE: Qwen3 whose layers have experts, but for those that config.json keeps dense."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, ExpertStackSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_activation, read_dense, read_model, read_num_layers, read_window
from .qwen3 import read_qwen3_attention

# Of Qwen3-VL's files; others have a tensor for each expert.
STACK = ExpertStackSpec(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", is_transposed=None)


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("max_window_layers", "sliding_window")
    attention = read_qwen3_attention(fields, num_kv_heads=4, head_size=None)
    if fields.boolean("use_sliding_window", False):
        attention = replace(attention, window=read_window(fields, 4096))
    num_experts, num_experts_per_tok = read_num_experts(fields, default=128, per_token=8)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        activation=read_activation(fields),
        norm_topk_prob=fields.boolean("norm_topk_prob", False),
        stack=STACK,
    )
    dense = read_dense(fields)
    layers = [
        LayerSpec(attention=attention, ffn=experts if is_sparse else dense)
        for is_sparse in read_sparse(fields)
    ]
    return read_model(fields, "Qwen3MoeForCausalLM", layers, max_positions=32768)


def read_sparse(fields: ConfigFields) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th, without those in mlp_only_layers."""
    step, num_layers = fields.integer("decoder_sparse_step", 1), read_num_layers(fields)
    dense: Any = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in cast(list[Any], dense)):
        raise fields.error("mlp_only_layers", dense, "a list of layers' numbers")
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)]
