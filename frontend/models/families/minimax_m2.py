"""MiniMax M2: norms of all queries and all keys, part of each head is rotated, experts by a sigmoid."""

from __future__ import annotations

from msgspec.structs import replace

from ....ipc.spec.model_spec import ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_activation, read_attention, read_model, read_num_layers
from .rope import read_rope
from .routed import skip_predicting_layers

_EXPERTS = "block_sparse_moe."
# What the maker's own code knows beside transformers', with the value of what is computed.
_ONLY = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    for key, only in _ONLY.items():
        fields.only(key, only)
    fields.only("attn_type_list", [1] * read_num_layers(fields))
    max_positions = fields.integer("max_position_embeddings", 196608)
    heads = read_attention(fields, num_kv_heads=8, head_size=128)
    rotated = fields.integer("rotary_dim", heads.head_size, high=heads.head_size)
    num_experts, num_experts_per_tok = read_num_experts(fields, default=256, per_token=8)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("intermediate_size", 1536),
        activation=read_activation(fields),
        scoring="sigmoid",
        router=f"{_EXPERTS}gate",
        correction=f"{_EXPERTS}e_score_correction_bias",
        gate=f"{_EXPERTS}experts.{{}}.w1",
        up=f"{_EXPERTS}experts.{{}}.w3",
        down=f"{_EXPERTS}experts.{{}}.w2",
    )
    layer = LayerSpec(attention=replace(heads, qk_norm="all_heads"), ffn=experts)
    share = rotated / heads.head_size
    return read_model(
        fields,
        "MiniMaxM2ForCausalLM",
        [layer] * read_num_layers(fields),
        max_positions,
        rope=read_rope(fields, max_positions, 5e6, head_size=heads.head_size, rotated_share=share),
        unused_tensors=skip_predicting_layers(fields, "num_mtp_modules"),
    )
