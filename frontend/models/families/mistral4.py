"""Mistral 4: latent attention whose queries are scaled beyond the trained length, softmax over experts."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, ExpertStackSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .latent import read_latent_attention
from .parts import read_model
from .routed import read_routed_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        raise fields.error("rope_parameters", fields.get("rope_parameters"), "an object")
    fields.only("n_group", 1)  # groups would count by probabilities, which are not what is compared here
    positions = fields.integer("max_position_embeddings", 1048576)
    attention, rope = read_latent_attention(
        fields,
        positions,
        q_rank=1024,
        rank=256,
        sizes=(64, 64, 128),
        is_interleaved=fields.boolean("rope_interleave", True),
        has_share=True,
        scales_queries=True,
    )
    each = read_routed_layers(
        fields, num_experts=128, per_token=4, num_shared=1, normalizes=True, methods=("softmax", "greedy")
    )
    stack = ExpertStackSpec(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")
    layers = [
        LayerSpec(
            attention=attention,
            ffn=replace(ffn, scoring="softmax", correction=None, stack=stack)
            if isinstance(ffn, ExpertsSpec)
            else ffn,
        )
        for ffn in each
    ]
    return read_model(fields, "Mistral4ForCausalLM", layers, positions, rope=rope)
