"""Llama 4, the text model: three of four layers rotate, norm what they rotated, and see a chunk of tokens.

The others see everything, unrotated, with queries scaled by their position. Chunks are not computed: a model
is served up to the length of one, within which all layers see the same (transformers, models/llama4).
"""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from ....ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    ExpertStackSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
)
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_activation, read_attention, read_model, read_num_layers
from .rope import read_rope

_KINDS = ("chunked_attention", "full_attention")
_SHARED = "feed_forward.shared_expert."


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    num_layers, activation = read_num_layers(fields), read_activation(fields)
    rotates, max_positions = (
        _read_rotating(fields, num_layers),
        fields.integer("max_position_embeddings", 131_072),
    )
    rope = replace(read_rope(fields, max_positions, 5e5), is_interleaved=True)
    kinds = fields.get("layer_types") or [_KINDS[not rotating] for rotating in rotates]
    if (
        not isinstance(kinds, list)
        or len(cast(list[Any], kinds)) != num_layers
        or not set(kinds) <= {*_KINDS}
    ):
        raise fields.error("layer_types", kinds, f"{num_layers} of {' and '.join(_KINDS)}")
    fields.ignore("attention_chunk_size")
    if _KINDS[0] in kinds and ("attention_chunk_size" not in fields or fields.get("attention_chunk_size")):
        max_positions = min(max_positions, fields.integer("attention_chunk_size", 8192))
        if rope.type not in ("default", "llama3"):  # which stretches what a model is served up to
            raise fields.error(
                "rope_parameters", f"rope_type {rope.type!r}", "default or llama3 beside chunks"
            )
    attention, unrotated = _read_attention(fields)
    dense = DenseSpec(
        intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        activation=activation,
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
    )
    experts, has_experts = _read_experts(fields, dense), _read_moe_layers(fields, num_layers)
    layers = [
        LayerSpec(
            attention=attention if rotates[index] else unrotated,
            ffn=experts if index in has_experts else dense,
        )
        for index in range(num_layers)
    ]
    spec = read_model(fields, "Llama4ForCausalLM", layers, 131_072, norm_eps=1e-5, rope=rope)
    return replace(spec, max_position_embeddings=max_positions)


def _read_rotating(fields: ConfigFields, num_layers: int) -> list[bool]:
    interval = fields.integer("no_rope_layer_interval", 4)
    each: Any = fields.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(each, list) or len(cast(list[Any], each)) < num_layers or not set(each) <= {0, 1}:
        raise fields.error(
            "no_rope_layers", each, f"0 or 1 for each of {num_layers} layers, 1 where it rotates"
        )
    return [bool(rotating) for rotating in cast(list[Any], each)[:num_layers]]


def _read_attention(fields: ConfigFields) -> tuple[AttentionSpec, AttentionSpec]:
    """Of layers that rotate, and of others."""
    attention = read_attention(fields, num_kv_heads=8, head_size=128, may_have_bias=True)
    scale, length = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    none = RopeConfig(type="none")
    if fields.boolean(
        "attn_temperature_tuning", True
    ):  # rotated by the angle 0, so that queries have factors
        none = RopeConfig(
            type="proportional",
            turning_share=0.0,
            query_scale_beta=scale,
            query_scale_offset=1,
            original_max_position_embeddings=length,
        )
    unrotated = replace(attention, rope=none)
    if fields.boolean("use_qk_norm", True):
        attention = replace(attention, qk_norm="each_head", qk_norm_has_weight=False, norms_rotated=True)
    return attention, unrotated


def _read_experts(fields: ConfigFields, dense: DenseSpec) -> ExpertsSpec:
    count, most = read_num_experts(fields, default=16, per_token=1)
    width = fields.integer("intermediate_size", 8192)
    names = {part: f"{_SHARED}{part}_proj" for part in ("gate", "up", "down")}
    return ExpertsSpec(
        num_experts=count,
        num_experts_per_tok=most,
        intermediate_size=width,
        activation=dense.activation,
        norm_topk_prob=False,
        scoring="sigmoid",
        scales_inputs=True,
        router="feed_forward.router",
        gate="feed_forward.experts.{}.gate_proj",
        up="feed_forward.experts.{}.up_proj",
        down="feed_forward.experts.{}.down_proj",
        stack=ExpertStackSpec(
            gate_up="feed_forward.experts.gate_up_proj",
            down="feed_forward.experts.down_proj",
            is_transposed=True,
        ),
        shared=replace(dense, intermediate_size=width, **names),
    )


def _read_moe_layers(fields: ConfigFields, num_layers: int) -> list[int]:
    step = fields.integer("interleave_moe_layer_step", 1)
    layers: Any = fields.get("moe_layers", list(range(step - 1, num_layers, step)))
    if not isinstance(layers, list) or not all(type(index) is int for index in cast(list[Any], layers)):
        raise fields.error("moe_layers", layers, "a list of layers' numbers")
    return cast(list[int], layers)
