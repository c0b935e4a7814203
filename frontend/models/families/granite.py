"""Granite: Llama with a number that multiplies the embeddings, scores, what layers add, and logits.

The dense models of Granite 4 are written as hybrids without experts and without recurrent layers.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import (
    DenseSpec,
    ExpertsSpec,
    ExpertStackSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
)
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_activation, read_attention, read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    ffn = replace(read_dense(fields), bias=fields.boolean("mlp_bias", False))
    return _read(fields, "GraniteForCausalLM", ffn)


def read_moe_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class GraniteMoe."""
    num_experts, num_experts_per_tok = read_num_experts(fields, default=8, per_token=2)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_activation(fields),
        router="block_sparse_moe.router.layer",
        stack=ExpertStackSpec(
            gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"
        ),
    )
    return _read(fields, "GraniteMoeForCausalLM", experts)


def read_hybrid_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class GraniteMoeHybrid."""
    if fields.integer("num_local_experts", 8, low=0):
        raise fields.error("num_local_experts", fields.get("num_local_experts"), "0")
    num_layers, kinds = read_num_layers(fields), fields.get("layer_types")
    is_attention = [kind in ("attention", "full_attention") for kind in kinds or [None]]
    if not all(is_attention) or len(is_attention) != num_layers:
        raise fields.error("layer_types", kinds, f"{num_layers} of 'attention'")
    for key in [key for key in fields if key.startswith("mamba_")]:
        fields.ignore(key)
    fields.ignore("num_experts_per_tok", "intermediate_size", "time_step_limit")  # of other layers
    ffn = DenseSpec(
        intermediate_size=fields.integer("shared_intermediate_size", 1024),
        activation=read_activation(fields),
        gate="shared_mlp.input_linear",
        fused="gate_up",
        down="shared_mlp.output_linear",
    )
    kind = fields.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise fields.error("position_embedding_type", kind, "'rope', 'nope' or null")
    if kind == "rope":
        return _read(fields, "GraniteMoeHybridForCausalLM", ffn)
    fields.ignore("rope_parameters", "rope_scaling", "rope_theta")
    return _read(fields, "GraniteMoeHybridForCausalLM", ffn, rope=RopeConfig(type="none"))


def _read(fields: ConfigFields, architecture: str, ffn: DenseSpec | ExpertsSpec, **others: Any) -> ModelSpec:
    scale, logits_scaling = fields.number("attention_multiplier", 1.0), fields.number("logits_scaling", 1.0)
    residual, embedding = (fields.number(f"{part}_multiplier", 1.0) for part in ("residual", "embedding"))
    layer = LayerSpec(
        attention=replace(read_attention(fields, may_have_bias=True), scale=scale),
        ffn=ffn,
        residual_scale=None if residual == 1 else residual,
    )
    return read_model(
        fields,
        architecture,
        [layer] * read_num_layers(fields),
        max_positions=2048,
        embedding_scale=None if embedding == 1 else embedding,
        logit_scale=None if logits_scaling == 1 else 1 / logits_scaling,
        **others,
    )
