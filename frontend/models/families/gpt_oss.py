"""gpt-oss: every layer has experts, every other one a window; scores have sinks (arXiv 2508.10925)."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, ExpertStackSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_attention, read_layer_types, read_model, read_num_layers, read_window


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    # The first exports have these beside num_experts_per_tok, layer_types and rope_scaling, which count.
    fields.ignore("experts_per_token", "initial_context_length", "hidden_act")
    for key, allowed in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        fields.only(key, allowed)
    num_layers, window = read_num_layers(fields), read_window(fields, 128)
    has_bias = fields.boolean("attention_bias", True)
    attention = replace(
        read_attention(fields, num_kv_heads=8, head_size=64),
        qkv_bias=has_bias,
        o_bias=has_bias,
        sinks="self_attn.sinks",
    )
    num_experts, num_experts_per_tok = read_num_experts(fields, default=128, per_token=4)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("intermediate_size", 2880),
        activation="clamped_swiglu",
        bias=True,
        router="mlp.router",
        router_bias=True,
        stack=ExpertStackSpec(
            gate_up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
            is_interleaved=True,
            is_transposed=True,
        ),
    )
    # transformers' default where config.json says nothing.
    rope = None
    if not any(fields.get(key) for key in ("rope_scaling", "rope_parameters")):
        theta = fields.number("rope_theta", 150000.0, low=1.0)
        rope = RopeConfig(
            theta=theta, type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
        )
    layers = [
        LayerSpec(attention=replace(attention, window=window if slides else None), ffn=experts)
        for slides in read_layer_types(fields, [layer % 2 == 0 for layer in range(num_layers)])
    ]
    return read_model(
        fields, "GptOssForCausalLM", layers, max_positions=131072, norm_eps=1e-5, rope_theta=150000.0,
        norm_rounds_normed=False, rope=rope,
    )  # fmt: skip
