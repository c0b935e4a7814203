"""Granite: Llama with a number that multiplies the embeddings, scores, what layers add, and logits.

Granite 4 has layers of Mamba-2 beside those of attention; its dense models are hybrids without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import (
    NO_ATTENTION,
    DenseSpec,
    ExpertsSpec,
    ExpertStackSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
)
from ....ipc.spec.recurrent_spec import Mamba2Spec
from .config_fields import ConfigFields
from .mamba2 import read_has_attention, read_mamba2
from .mixtral import read_num_experts
from .parts import read_activation, read_attention, read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    ffn = replace(read_dense(fields), bias=fields.boolean("mlp_bias", False))
    return _read(fields, "GraniteForCausalLM", ffn)


def read_moe_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class GraniteMoe."""
    return _read(fields, "GraniteMoeForCausalLM", _read_experts(fields))


def read_hybrid_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class GraniteMoeHybrid."""
    num_layers = read_num_layers(fields)
    is_attention = read_has_attention(fields, num_layers)
    ffn: DenseSpec | ExpertsSpec = DenseSpec(
        intermediate_size=fields.integer("shared_intermediate_size", 1024),
        activation=read_activation(fields),
        gate="shared_mlp.input_linear",
        fused="gate_up",
        down="shared_mlp.output_linear",
    )
    if fields.integer("num_local_experts", 8, low=0):
        ffn = replace(_read_experts(fields), shared=ffn)
    fields.ignore("num_experts_per_tok", "intermediate_size")  # of a model without experts
    recurrent = None if all(is_attention) else read_mamba2(fields)
    fields.ignore("time_step_limit", *(key for key in fields if key.startswith("mamba_")))
    hybrid: dict[str, Any] = {"ffn": ffn, "recurrent": [None if each else recurrent for each in is_attention]}
    kind = fields.get("position_embedding_type")
    if kind not in (None, "rope", "nope"):
        raise fields.error("position_embedding_type", kind, "'rope', 'nope' or null")
    if kind == "rope":
        return _read(fields, "GraniteMoeHybridForCausalLM", **hybrid)
    fields.ignore("rope_parameters", "rope_scaling", "rope_theta")
    return _read(fields, "GraniteMoeHybridForCausalLM", rope=RopeConfig(type="none"), **hybrid)


def _read_experts(fields: ConfigFields) -> ExpertsSpec:
    num_experts, num_experts_per_tok = read_num_experts(fields, default=8, per_token=2)
    return ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_activation(fields),
        router="block_sparse_moe.router.layer",
        stack=ExpertStackSpec(
            gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"
        ),
    )


def _read(
    fields: ConfigFields,
    architecture: str,
    ffn: DenseSpec | ExpertsSpec,
    recurrent: Sequence[Mamba2Spec | None] = (),
    **others: Any,
) -> ModelSpec:
    """`recurrent`: what layers have in attention's place, where they have something."""
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
        [
            layer if each is None else replace(layer, attention=NO_ATTENTION, recurrent=each)
            for each in recurrent or [None] * read_num_layers(fields)
        ],
        max_positions=2048,
        embedding_scale=None if embedding == 1 else embedding,
        logit_scale=None if logits_scaling == 1 else 1 / logits_scaling,
        **others,
    )
