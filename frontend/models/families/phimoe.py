"""Phi-3.5-MoE: Mixtral with LayerNorms and biases, whose two experts a token SparseMixer chooses.

transformers keeps the short factors of its longrope beyond the trained length; the model was trained with the
long ones there, which are taken here (in an engine whose sequences may be so long).
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mixtral import EXPERT, read_num_experts
from .parts import read_activation, read_attention, read_model, read_num_layers, read_window
from .rope import read_rope

_EQUAL = 1e-30  # as a threshold: no logit but an equal one counts


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    heads = read_attention(fields, num_kv_heads=8, may_have_bias=True)
    fields.only("num_experts_per_tok", 2)
    experts = ExpertsSpec(
        num_experts=read_num_experts(fields, default=16, per_token=2)[0],
        num_experts_per_tok=2,
        intermediate_size=fields.integer("intermediate_size", 6400),
        activation=read_activation(fields),
        mixer_threshold=2 * fields.number("router_jitter_noise", 0.01, low=0.0) or _EQUAL,
        router="block_sparse_moe.gate",
        gate=EXPERT + "w1",
        up=EXPERT + "w3",
        down=EXPERT + "w2",
    )
    max_positions = fields.integer("max_position_embeddings", 131072)
    rope = read_rope(fields, max_positions, 1e6, head_size=heads.head_size, has_factors=True)
    if rope.rotated_size is not None:
        raise fields.error("partial_rotary_factor", rope.rotated_size / heads.head_size, "1 (a whole head)")
    if rope.type == "longrope":
        settings: Any = fields.get("rope_scaling") or fields.get("rope_parameters")
        scaling = ConfigFields(settings, "rope_scaling.")
        scale = scaling.number("short_mscale")
        scaling.only("long_mscale", scale)
        rope = replace(rope, attention_factor=scale)
    layer = LayerSpec(attention=replace(heads, window=read_window(fields, None)), ffn=experts)
    return read_model(
        fields,
        "PhimoeForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        norm_eps=1e-5,
        rope=rope,
        norm_kind="layer",
        norm_bias=True,
        lm_head_bias=fields.boolean("lm_head_bias", False),
    )
