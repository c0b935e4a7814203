"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, attention with gates in some."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec
from ....ipc.spec.recurrent_spec import MAX_KERNEL_SIZE, DeltaNetSpec
from .config_fields import ConfigFields
from .parts import read_dense, read_layer_types, read_model, read_num_layers
from .qwen2_moe import read_experts
from .qwen3 import read_qwen3_attention
from .qwen3_moe import STACK, read_sparse
from .rope import read_rope

_FUSED: dict[str, Any] = {
    "projections": ("linear_attn.in_proj_qkvz",),
    "gates": ("linear_attn.in_proj_ba",),
}


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Qwen3Next."""
    experts = read_experts(fields, num_experts=512, per_token=10, widths=(512, 512), norm_topk_prob=True)
    dense = read_dense(fields)
    ffns: list[DenseSpec | ExpertsSpec] = [experts if each else dense for each in read_sparse(fields)]
    return _read(fields, "Qwen3NextForCausalLM", ffns, num_kv_heads=2, **_FUSED)


def read_dense_spec(fields: ConfigFields) -> ModelSpec:
    """Of Qwen3.5."""
    ffns = [read_dense(fields)] * read_num_layers(fields)
    return _read(fields, "Qwen3_5ForCausalLM", ffns, num_kv_heads=4)


def read_moe_spec(fields: ConfigFields) -> ModelSpec:
    """Of Qwen3.5 with experts."""
    fields.only("norm_topk_prob", True)
    experts = read_experts(fields, num_experts=256, per_token=8, widths=(512, 512), norm_topk_prob=True)
    ffns = [replace(experts, stack=STACK)] * read_num_layers(fields)
    return _read(fields, "Qwen3_5MoeForCausalLM", ffns, num_kv_heads=2)


def _read(
    fields: ConfigFields, architecture: str, ffns: list[Any], num_kv_heads: int, **names: Any
) -> ModelSpec:
    fields.ignore(
        "mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "intermediate_size"
    )
    heads = read_qwen3_attention(fields, num_kv_heads=num_kv_heads, head_size=256)
    attention = replace(heads, has_gate=True)
    key_heads = fields.integer("linear_num_key_heads", 16)
    value_heads = fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", value_heads, f"a multiple of {key_heads} key heads")
    delta = DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_size=fields.integer("linear_key_head_dim", 128),
        value_size=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_KERNEL_SIZE),
        **names,
    )
    interval = fields.integer("full_attention_interval", 4)
    usual = [(index + 1) % interval > 0 for index in range(len(ffns))]
    layers = [
        LayerSpec(recurrent=delta, ffn=ffn) if is_linear else LayerSpec(attention=attention, ffn=ffn)
        for ffn, is_linear in zip(ffns, read_layer_types(fields, usual, "linear_attention"), strict=True)
    ]
    max_positions = fields.integer("max_position_embeddings", 32768)
    rope = read_rope(fields, max_positions, head_size=heads.head_size, rotated_share=0.25)
    return read_model(
        fields,
        architecture,
        layers,
        max_positions,
        rope=rope,
        norm_weight_offset=1.0,
        norm_rounds_normed=False,
        unused_tensors=("mtp.",),
    )
