"""MiniCPM3: latent attention in halves, dense layers, numbers that scale embeddings, layers and logits."""

from __future__ import annotations

import math
from typing import Any

from ....ipc.spec.model_spec import LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .latent import read_latent_attention
from .parts import read_dense, read_model, read_num_layers


def read_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json."""
    fields.only("mlp_bias", False)
    positions, num_layers = fields.integer("max_position_embeddings", 32768), read_num_layers(fields)
    settings: Any = fields.get("rope_scaling") or fields.get("rope_parameters")
    options: dict[str, Any] = {"q_rank": 768, "rank": 256, "sizes": (64, 32, None), "is_interleaved": False}
    if isinstance(settings, dict) and "short_factor" in settings:
        options |= {"has_factors": True, "head_size": fields.integer("qk_rope_head_dim", 32)}
    attention, rope = read_latent_attention(fields, positions, **options)
    depth = fields.optional_number("scale_depth", 1.4, tests_truth=False) or math.sqrt(num_layers)
    scale = depth / math.sqrt(num_layers)
    layer = LayerSpec(attention=attention, ffn=read_dense(fields), residual_scale=scale)
    hidden = fields.integer("hidden_size")
    base = hidden if "dim_model_base" in fields and fields.get("dim_model_base") is None else 256
    return read_model(
        fields,
        "MiniCPM3ForCausalLM",
        [layer] * num_layers,
        positions,
        norm_eps=1e-5,
        rope=rope,
        tie_word_embeddings=True,
        embedding_scale=fields.number("scale_emb", 12.0),
        logit_scale=fields.integer("dim_model_base", base) / hidden,
    )
