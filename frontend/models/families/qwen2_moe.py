"""Qwen2-MoE: Qwen2 with experts, and a shared one that has a gate, in the layers that are not kept dense."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_activation, read_attention, read_dense, read_layer_types, read_model, read_window
from .qwen3_moe import read_sparse

_SHARED = "mlp.shared_expert."


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.ignore("sliding_window")
    attention = replace(read_attention(fields, num_kv_heads=16), qkv_bias=fields.boolean("qkv_bias", True))
    experts = read_experts(fields, num_experts=60, per_token=4, widths=(1408, 5632), norm_topk_prob=False)
    is_sparse, dense = read_sparse(fields), read_dense(fields)
    slides = fields.boolean("use_sliding_window", False)
    first = fields.integer("max_window_layers", 28, low=0)
    usual = [slides and layer % 2 == 0 and layer < first for layer in range(len(is_sparse))]
    is_sliding = read_layer_types(fields, usual)
    window = read_window(fields, 4096) if slides else None
    layers = [
        LayerSpec(
            attention=replace(attention, window=window if is_windowed else None),
            ffn=experts if has_experts else dense,
        )
        for is_windowed, has_experts in zip(is_sliding, is_sparse, strict=True)
    ]
    return read_model(fields, "Qwen2MoeForCausalLM", layers, max_positions=32768)


def read_experts(
    fields: ConfigFields, num_experts: int, per_token: int, widths: tuple[int, int], norm_topk_prob: bool
) -> ExpertsSpec:
    """Those of a layer with the shared one. What is given is the family's default; `widths` are of both."""
    num_experts, num_experts_per_tok = read_num_experts(fields, default=num_experts, per_token=per_token)
    activation = read_activation(fields)
    shared = DenseSpec(
        intermediate_size=fields.integer("shared_expert_intermediate_size", widths[1]),
        activation=activation,
        gate=f"{_SHARED}gate_proj",
        up=f"{_SHARED}up_proj",
        down=f"{_SHARED}down_proj",
    )
    return ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("moe_intermediate_size", widths[0]),
        activation=activation,
        norm_topk_prob=fields.boolean("norm_topk_prob", norm_topk_prob),
        shared=shared,
        shared_gate="mlp.shared_expert_gate",
    )
