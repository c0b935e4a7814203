"""Latent attention, as DeepSeek V2 brought it and others have it: the part of config.json that it takes."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import AttentionSpec, LatentSpec, RopeConfig
from .config_fields import ConfigFields
from .rope import read_rope


def read_latent_attention(
    fields: ConfigFields,
    max_positions: int,
    *,
    q_rank: int = 1536,
    rank: int = 512,
    sizes: tuple[int, int, int | None] = (128, 64, 128),
    is_interleaved: bool = True,
    has_share: bool = False,
    **rope_options: Any,
) -> tuple[AttentionSpec, RopeConfig]:
    """A layer's attention and the model's rotation; the keywords are the family's defaults.

    `sizes` are of a head's numbers: without rotation, with it, and of values, None for hidden_size / heads.
    `has_share`: the rotation's settings have the rotated share of a head.
    """
    num_heads = fields.integer("num_attention_heads")
    if (count := fields.integer("num_key_value_heads", num_heads)) != num_heads:
        raise fields.error("num_key_value_heads", count, f"{num_heads}, as num_attention_heads")
    fields.ignore("head_dim", "qk_head_dim")
    nope, rope_size = (
        fields.integer("qk_nope_head_dim", sizes[0]),
        fields.integer("qk_rope_head_dim", sizes[1]),
    )
    if rope_size % 2:
        raise fields.error("qk_rope_head_dim", rope_size, "an even number (rotary embedding turns pairs)")
    value = fields.integer("v_head_dim", sizes[2] or max(1, fields.integer("hidden_size") // num_heads))
    has_q_rank = "q_lora_rank" not in fields or fields.get("q_lora_rank") not in (None, 0)
    bias = fields.boolean("attention_bias", False)
    latent = LatentSpec(
        rank=fields.integer("kv_lora_rank", rank),
        nope_size=nope,
        rope_size=rope_size,
        value_size=value,
        q_rank=fields.integer("q_lora_rank", q_rank) if has_q_rank else None,
        bias=bias,
    )
    if has_share:
        rope_options |= {"head_size": nope + rope_size, "rotated_share": rope_size / (nope + rope_size)}
    rope = read_rope(fields, max_positions, **rope_options)
    if has_share and rope.rotated_size != rope_size:
        raise fields.error(
            "qk_rope_head_dim", rope_size, "the part of a head that partial_rotary_factor gives"
        )
    scale = (nope + rope_size) ** -0.5
    if rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=latent.size,
        scale=scale,
        o_bias=bias,
        qkv=(),
        latent=latent,
    )
    return attention, replace(rope, rotated_size=None, is_interleaved=is_interleaved)
