"""LFM2: short convolutions in most layers, attention with norms of heads in some; dense or with experts."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec, ExpertStackSpec, LayerSpec, ModelSpec
from ....ipc.spec.recurrent_spec import MAX_KERNEL_SIZE, ShortConvSpec
from .config_fields import ConfigFields
from .mixtral import read_num_experts
from .parts import read_attention, read_model, read_num_layers

_FULL, _CONV = "full_attention", "conv"


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Lfm2."""
    # Of the makers' own code; transformers computes without them.
    fields.ignore("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps")
    fields.rename(intermediate_size="block_ff_dim" if "block_ff_dim" in fields else "intermediate_size")
    width = fields.integer("intermediate_size", 12288)
    multiple, factor = fields.integer("block_multiple_of", 256), fields.number("block_ffn_dim_multiplier", 1)
    if fields.boolean("block_auto_adjust_ff_dim", True):
        width = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    return _read(fields, "Lfm2ForCausalLM", [_make_dense(width)] * read_num_layers(fields))


def read_moe_spec(fields: ConfigFields) -> ModelSpec:
    """Of Lfm2Moe. transformers adds 1e-6 to the sum that chosen scores are divided by, which is left out."""
    count, per_token = read_num_experts(fields, default=32, per_token=4)
    experts = ExpertsSpec(
        num_experts=count,
        num_experts_per_tok=per_token,
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        norm_topk_prob=fields.boolean("norm_topk_prob", True),
        scoring="sigmoid",
        router="feed_forward.gate",
        correction="feed_forward.expert_bias" if fields.boolean("use_expert_bias", True) else None,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        stack=ExpertStackSpec(
            gate_up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"
        ),
        **_name("feed_forward.experts.{}."),
    )
    num_layers, dense = read_num_layers(fields), _make_dense(fields.integer("intermediate_size", 7168))
    num_dense = fields.integer("num_dense_layers", 2, low=0)
    ffns: list[DenseSpec | ExpertsSpec] = [
        dense if index < num_dense else experts for index in range(num_layers)
    ]
    return _read(fields, "Lfm2MoeForCausalLM", ffns)


def _make_dense(width: int) -> DenseSpec:
    return DenseSpec(intermediate_size=width, **_name("feed_forward."))


def _name(prefix: str) -> dict[str, Any]:
    return {"gate": f"{prefix}w1", "up": f"{prefix}w3", "down": f"{prefix}w2"}


def _read(fields: ConfigFields, architecture: str, ffns: list[Any]) -> ModelSpec:
    fields.rename(rms_norm_eps="norm_eps")
    if "tie_embedding" in fields:
        fields.rename(tie_word_embeddings="tie_embedding")
    attention = replace(
        read_attention(fields, num_kv_heads=8),
        qk_norm="each_head",
        out="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
    )
    conv = ShortConvSpec(
        num_channels=fields.integer("hidden_size"),
        kernel_size=fields.integer("conv_L_cache", 3, low=2, high=MAX_KERNEL_SIZE),
        bias=fields.boolean("conv_bias", False),
    )
    layers = [
        LayerSpec(attention=attention, ffn=ffn) if is_attention else LayerSpec(recurrent=conv, ffn=ffn)
        for ffn, is_attention in zip(ffns, _read_kinds(fields, len(ffns)), strict=True)
    ]
    return read_model(
        fields,
        architecture,
        [replace(layer, attention_norm="operator_norm", ffn_norm="ffn_norm") for layer in layers],
        max_positions=128_000,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
        norm="model.embedding_norm",
    )


def _read_kinds(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Which layers have attention."""
    kinds, indexes = fields.get("layer_types"), fields.get("full_attn_idxs")
    if kinds is None and indexes is not None:
        kinds = [_FULL if index in indexes else _CONV for index in range(num_layers)]
    kinds = [_FULL] * num_layers if kinds is None else kinds
    if len(kinds) != num_layers or not {_FULL, _CONV}.issuperset(kinds):
        raise fields.error("layer_types", kinds, f"{num_layers} of {_FULL!r} and {_CONV!r}")
    return [kind == _FULL for kind in kinds]
