"""ERNIE 4.5 with experts: softmax scores with a correction for the choice, some layers dense."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mixtral import MAX_EXPERTS
from .parts import read_activation, read_attention, read_dense, read_model, read_num_layers
from .rope import read_rope

_SHARED = "mlp.shared_experts."


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    max_positions, bias = fields.integer("max_position_embeddings", 131072), fields.boolean("use_bias", False)
    heads = replace(read_attention(fields, num_kv_heads=4), qkv_bias=bias, o_bias=bias)
    num_layers = read_num_layers(fields)
    if (least := fields.number("moe_norm_min", 1e-12)) > 1e-6:  # which no sum of scores is below
        raise fields.error("moe_norm_min", least, "at most 1e-6")
    # transformers' config class has these names for them.
    num_experts = fields.integer(
        "moe_num_experts", fields.get("num_experts", 64), high=MAX_EXPERTS // num_layers
    )
    shared = fields.integer("moe_num_shared_experts", 2, low=0)
    width, activation = fields.integer("moe_intermediate_size", 1536), read_activation(fields)
    experts = ExpertsSpec(
        router_is_float32=True,
        num_experts=num_experts,
        num_experts_per_tok=fields.integer("moe_k", fields.get("num_experts_per_tok", 6), high=num_experts),
        intermediate_size=width,
        activation=activation,
        correction="mlp.moe_statics.e_score_correction_bias",
        shared=DenseSpec(
            intermediate_size=width * shared,
            activation=activation,
            bias=bias,
            gate=f"{_SHARED}gate_proj",
            up=f"{_SHARED}up_proj",
            down=f"{_SHARED}down_proj",
        )
        if shared
        else None,
    )
    first, step = fields.integer("moe_layer_start_index", 1, low=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    last = num_layers - 1 if last == -1 else last
    dense = replace(read_dense(fields), bias=bias)
    layers = [
        LayerSpec(
            attention=heads,
            ffn=experts if (layer + 1) % step == 0 and first <= layer <= last else dense,
        )
        for layer in range(num_layers)
    ]
    return read_model(
        fields,
        "Ernie4_5_MoeForCausalLM",
        layers,
        max_positions,
        norm_eps=1e-5,
        rope=replace(read_rope(fields, max_positions, 500_000.0), is_interleaved=True),
        tie_word_embeddings=True,
        lm_head_bias=bias,
    )
