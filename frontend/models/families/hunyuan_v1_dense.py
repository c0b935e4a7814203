"""Hunyuan, the dense models: Llama with norms of each head after their rotation.

Its rope is called dynamic, and one with `alpha` has a fixed base.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import LayerSpec, ModelSpec, RopeConfig
from .config_fields import ConfigFields
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
    """The model of config.json."""
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
    layers = [LayerSpec(attention=heads, ffn=read_dense(fields))] * read_num_layers(fields)
    others: dict[str, Any] = (
        {} if (rope := _read_fixed_rope(fields, heads.head_size)) is None else {"rope": rope}
    )
    return read_model(
        fields, "HunYuanDenseV1ForCausalLM", layers, max_positions=2048, norm_eps=1e-5, **others
    )


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
