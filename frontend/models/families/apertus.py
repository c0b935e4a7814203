"""Apertus: norms of each head, and without a gate xIELU (arXiv 2411.13010), of numbers that are tensors."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .parts import read_attention, read_model, read_num_layers

_ROPE = RopeConfig(
    type="llama3",
    theta=12e6,
    factor=8.0,
    original_max_position_embeddings=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    for key, only in {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False}.items():
        fields.only(key, only)
    width = fields.integer("intermediate_size")
    layer = LayerSpec(
        attention=replace(read_attention(fields, may_have_bias=True), qk_norm="each_head"),
        ffn=DenseSpec(intermediate_size=width, is_gated=False, xielu="mlp.act_fn"),
        attention_norm="attention_layernorm",
        ffn_norm="feedforward_layernorm",
    )
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    return read_model(
        fields,
        "ApertusForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions=65536,
        norm_eps=1e-5,
        rope_theta=12e6,
        rope=None if has_rope else _ROPE,
    )
