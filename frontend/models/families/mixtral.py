"""Mixtral: Mistral whose feed-forward parts are experts."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .parts import read_activation, read_attention, read_model, read_num_layers, read_window

MAX_EXPERTS = 200_000  # of all layers: each is written out; the largest published models have 25,000
EXPERT = "block_sparse_moe.experts.{}."


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    attention = replace(read_attention(fields, num_kv_heads=8), window=read_window(fields, None))
    num_experts, num_experts_per_tok = read_num_experts(fields, default=8, per_token=2)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_activation(fields),
        router="block_sparse_moe.gate",
        gate=EXPERT + "w1",
        up=EXPERT + "w3",
        down=EXPERT + "w2",
    )
    layers = [LayerSpec(attention=attention, ffn=experts)] * read_num_layers(fields)
    return read_model(
        fields, "MixtralForCausalLM", layers, max_positions=131072, norm_eps=1e-5, rope_theta=1e6
    )


def read_num_experts(fields: ConfigFields, default: int, per_token: int) -> tuple[int, int]:
    """(experts of a layer, those that a token is sent to); the count has two names."""
    highest = MAX_EXPERTS // read_num_layers(fields)
    old = fields.integer("num_experts", default, high=highest)
    num_experts = fields.integer("num_local_experts", old, high=highest)
    most = fields.integer("num_experts_per_tok", per_token)
    if most > num_experts:
        raise fields.error("num_experts_per_tok", most, f"at most {num_experts}, the experts of a layer")
    return num_experts, most
