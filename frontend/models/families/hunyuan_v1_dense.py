"""Hunyuan: Llama with norms of each head after their rotation, dense or with experts beside a shared network.

Its rope is called dynamic, and one with `alpha` has a fixed base.
"""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
from .mixtral import MAX_EXPERTS
from .parts import read_attention, read_dense, read_model, read_num_layers

# What the maker's own code knows beside transformers', with the value of what is computed.
_ONLY = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_rotary_pos_emb": True,
    "norm_type": "rms",
    "mlp_bias": False,
}
_UNUSED = ("attention_head_dim", "cla_share_factor", "dense_list", "pool_type")


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The dense model of config.json."""
    return _read(fields, "HunYuanDenseV1ForCausalLM", read_dense(fields))


def read_moe_spec(fields: ConfigFields) -> ModelSpec:
    """The model with experts."""
    fields.only("use_mixed_mlp_moe", True)
    for key, only in (
        ("num_shared_expert", 1),
        ("moe_layer_num_skipped", 0),
        ("moe_intermediate_size", None),
    ):
        value = fields.get(key)
        each = value if isinstance(value, list) else [value]
        width = fields.integer("intermediate_size")
        if any(item not in (None, only if only is not None else width) for item in each):
            raise fields.error(key, value, str(only if only is not None else width))
    num_experts = _read_same(fields, "num_experts", 1, MAX_EXPERTS // read_num_layers(fields))
    dense = read_dense(fields)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_experts_per_tok=_read_same(fields, "moe_topk", 1, num_experts),
        intermediate_size=dense.intermediate_size,
        activation=dense.activation,
        router="mlp.gate.wg",
        shared=replace(
            dense,
            gate="mlp.shared_mlp.gate_proj",
            up="mlp.shared_mlp.up_proj",
            down="mlp.shared_mlp.down_proj",
        ),
    )
    return _read(fields, "HunYuanMoEV1ForCausalLM", experts)


def _read_same(fields: ConfigFields, key: str, default: int, high: int) -> int:
    """An integer, or a list of the same for each layer."""
    value: Any = fields.get(key, default)
    if isinstance(value, list) and value and all(each == value[0] for each in cast(list[Any], value)):
        return ConfigFields({key: cast(list[Any], value)[0]}).integer(key, high=high)
    return fields.integer(key, default, high=high)


def _read(fields: ConfigFields, architecture: str, ffn: DenseSpec | ExpertsSpec) -> ModelSpec:
    for key, only in _ONLY.items():
        fields.only(key, only)
    fields.ignore(*_UNUSED)
    heads = replace(
        read_attention(fields, may_have_bias=True),
        qk_norm="each_head",
        norms_rotated=True,
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
    )
    layers = [LayerSpec(attention=heads, ffn=ffn)] * read_num_layers(fields)
    others: dict[str, Any] = (
        {} if (rope := _read_fixed_rope(fields, heads.head_size)) is None else {"rope": rope}
    )
    return read_model(fields, architecture, layers, max_positions=2048, norm_eps=1e-5, **others)


def _read_fixed_rope(fields: ConfigFields, head_size: int) -> RopeConfig | None:
    """The rope with `alpha`, of which the other keys decide nothing; None: another one."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    values: Any = fields.get(name)
    rope = ConfigFields(values if isinstance(values, dict) else {}, f"{name}.")
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return None
    if head_size <= 2:  # head_size - 2 is a divisor
        raise fields.error("head_dim", head_size, f"above 2 with {name}.alpha")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0, low=1.0), low=1.0)
    theta *= rope.number("alpha") ** (head_size / (head_size - 2))
    return RopeConfig(theta=ConfigFields({"alpha": theta}, f"{name}.").number("alpha"))
