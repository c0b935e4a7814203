"""Gemma 4, the text model: layers with a window and layers without differ in heads, their size, and rotation.

Norms multiply by their weight alone, values are normed, scores are not scaled; a layer ends with a factor.
Some sizes have a dense network and experts side by side, some an input of each layer by token and late
layers without keys and values (transformers, models/gemma4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msgspec.structs import replace

from ....ipc.spec.model_spec import (
    AttentionSpec,
    BranchNormsSpec,
    DenseSpec,
    ExpertsSpec,
    ExpertStackSpec,
    LayerInputSpec,
    LayerSpec,
    ModelSpec,
    PerLayerInputsSpec,
)
from .config_fields import ConfigFields
from .mixtral import MAX_EXPERTS
from .parts import read_attention, read_dense, read_layer_types, read_model, read_num_layers, read_window
from .rope import read_ropes_by_kind

_PATTERN = 6
_MAX_POSITIONS = 131_072
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json. A text sees nothing ahead where only images do ("vision")."""
    if (kind := fields.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise fields.error("use_bidirectional_attention", kind, "null or 'vision', as models that generate")
    num_layers, hidden = read_num_layers(fields), fields.integer("hidden_size")
    input_size = fields.integer("hidden_size_per_layer_input", 256, low=0)
    num_rows = fields.integer("vocab_size_per_layer_input", 262_144)
    if input_size and num_rows < (vocab_size := fields.integer("vocab_size")):
        raise fields.error("vocab_size_per_layer_input", num_rows, f"at least vocab_size={vocab_size}")
    is_sliding = read_layer_types(fields, [(layer + 1) % _PATTERN != 0 for layer in range(num_layers)])
    is_sliding[-1] = False  # as transformers has it
    num_own = num_layers - fields.integer("num_kv_shared_layers", 0, low=0, high=num_layers - 1)
    attention = _read_attention(fields, is_sliding, num_own)
    ffn = read_dense(fields, activation_key="hidden_activation", activation="gelu_pytorch_tanh")
    is_wide = fields.boolean("use_double_wide_mlp", False)
    wide = replace(ffn, intermediate_size=2 * ffn.intermediate_size) if is_wide else ffn
    parts = [ffn] * num_own + [wide] * (num_layers - num_own)
    layer_input = LayerInputSpec(activation=ffn.activation) if input_size else None
    has_experts = fields.boolean("enable_moe_block", False)
    layers = [
        LayerSpec(
            attention=each,
            ffn=_read_experts(fields, part) if has_experts else part,
            attention_out_norm="post_attention_layernorm",
            ffn_norm=None if has_experts else "pre_feedforward_layernorm",
            ffn_out_norm="post_feedforward_layernorm",
            layer_input=layer_input,
            scalar="layer_scalar",
        )
        for each, part in zip(attention, parts, strict=True)
    ]
    fields.ignore("num_experts", "top_k_experts", "moe_intermediate_size", "per_layer_config")
    fields.ignore("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")
    return read_model(
        fields,
        "Gemma4ForCausalLM",
        layers,
        _MAX_POSITIONS,
        rope=next(each.rope for each in attention if each.rope is not None),
        tie_word_embeddings=True,
        norm_rounds_normed=False,
        embedding_scale=hidden**0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping", tests_truth=False),
        per_layer_inputs=PerLayerInputsSpec(size=input_size, num_rows=num_rows) if input_size else None,
        unused_tensors=tuple(  # of layers that read the keys and values of others, which may have some
            f"model.layers.{index}.self_attn.{name}"
            for index in range(num_own, num_layers)
            for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        ),
    )


def _read_attention(fields: ConfigFields, is_sliding: Sequence[bool], num_own: int) -> list[AttentionSpec]:
    """Of each layer; those from `num_own` on read the keys of the last one of their kind before it."""
    max_positions = fields.integer("max_position_embeddings", _MAX_POSITIONS)
    rope, sliding_rope = read_ropes_by_kind(fields, max_positions, 1e6, 1e4, defaults=_ROPES)
    heads = read_attention(fields, num_kv_heads=4, head_size=256, may_have_bias=True)
    heads = replace(heads, scale=1.0, qk_norm="each_head", norms_values=True)
    window, shares_values = read_window(fields, 512), fields.boolean("attention_k_eq_v", False)
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.k_proj") if shares_values else heads.qkv
    layers: list[AttentionSpec] = []
    for index, slides in enumerate(is_sliding):
        num_kv_heads, head_size = _read_heads(fields, index, slides, heads, shares_values)
        layer = replace(heads, num_kv_heads=num_kv_heads, head_size=head_size)
        layer = (
            replace(layer, window=window, rope=sliding_rope) if slides else replace(layer, rope=rope, qkv=qkv)
        )
        if index >= num_own:
            sources = [source for source in range(num_own) if is_sliding[source] == slides]
            if not sources:
                raise fields.error("num_kv_shared_layers", len(is_sliding) - num_own, "fewer, of each kind")
            layer = replace(layer, kv_layer=sources[-1], qkv=heads.qkv[:1], norms_values=False)
        layers.append(layer)
    return layers


def _read_heads(
    fields: ConfigFields, index: int, slides: bool, heads: AttentionSpec, shares_values: bool
) -> tuple[int, int]:
    """A layer's heads of keys and values, and the size of all its heads."""
    each = fields.get("per_layer_config")
    if isinstance(each, dict):  # of newer files, in the place of what follows
        values: Any = cast(dict[str, Any], each).get(str(index), {})
        if not isinstance(values, dict):
            raise fields.error("per_layer_config", values, f"an object for layer {index}")
        layer = ConfigFields(cast(dict[str, Any], values), f"per_layer_config.{index}.")
        count = layer.integer("num_key_value_heads", heads.num_kv_heads)
        sizes = count, layer.integer("head_dim", heads.head_size)
        layer.check_rest("Gemma4ForCausalLM")
    elif slides:
        sizes = heads.num_kv_heads, heads.head_size
    else:
        count = fields.integer("num_global_key_value_heads", heads.num_kv_heads)
        sizes = count if shares_values else heads.num_kv_heads, fields.integer("global_head_dim", 512)
    if heads.num_heads % sizes[0] or sizes[1] % 2:
        allowed = f"KV heads that divide {heads.num_heads}, and an even head size"
        raise fields.error("per_layer_config", f"{sizes} in layer {index}", allowed)
    return sizes


def _read_experts(fields: ConfigFields, dense: DenseSpec) -> ExpertsSpec:
    count = fields.integer("num_experts", high=MAX_EXPERTS)
    return ExpertsSpec(
        num_experts=count,
        num_experts_per_tok=fields.integer("top_k_experts", high=count),
        intermediate_size=fields.integer("moe_intermediate_size"),
        activation=dense.activation,
        router="router.proj",
        expert_scales="router.per_expert_scale",
        gate="experts.{}.gate_proj",
        up="experts.{}.up_proj",
        down="experts.{}.down_proj",
        stack=ExpertStackSpec(gate_up="experts.gate_up_proj", down="experts.down_proj"),
        shared=dense,
        branch_norms=BranchNormsSpec(),
    )
