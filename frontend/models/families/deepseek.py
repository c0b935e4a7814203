"""DeepSeek V2 to V3.2 and what is built like them: latent attention, experts after the first layers.

V3.2 and GLM-5 choose the keys that a query sees by an indexer, which is not read: contexts are as long
as what it chooses at most, and all keys are seen.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....ipc.spec.model_spec import DenseSpec, ExpertsSpec, LayerSpec, ModelSpec
from .config_fields import ConfigFields
from .latent import read_latent_attention
from .parts import read_model
from .routed import read_routed_layers, skip_predicting_layers

_V3: dict[str, Any] = {
    "num_experts": 256,
    "per_token": 8,
    "num_shared": 1,
    "num_dense": 3,
    "normalizes": True,
    "scale": 2.5,
    "groups": (8, 4),
}
_V32: dict[str, Any] = {**_V3, "reads_kinds": True}
_GLM: dict[str, Any] = {**_V32, "groups": (1, 1)}


def read_v2_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class DeepseekV2."""
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    fields.only("norm_topk_prob", False)
    bias = fields.boolean("mlp_bias", False)
    each = read_routed_layers(fields, num_experts=64, num_shared=2, methods=("softmax", method))
    groups = {"num_groups": 1, "num_groups_per_tok": 1} if method == "greedy" else {}
    router: dict[str, Any] = {"scoring": "softmax", "correction": None, "group_score": "max", **groups}
    layers: list[DenseSpec | ExpertsSpec] = []
    for ffn in each:
        if isinstance(ffn, DenseSpec):
            layers.append(replace(ffn, bias=bias))
        else:
            shared = ffn.shared and replace(ffn.shared, bias=bias)
            layers.append(replace(ffn, shared=shared, **router))
    return _read(fields, "DeepseekV2ForCausalLM", layers, 2048)


def read_v3_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class DeepseekV3; Kimi K2 too."""
    is_interleaved = fields.boolean("rope_interleave", True)
    each = read_routed_layers(fields, **_V3)
    return _read(fields, "DeepseekV3ForCausalLM", each, 4096, is_interleaved=is_interleaved)


def read_v32_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class DeepseekV32."""
    each = read_routed_layers(fields, **_V32)
    return _read_chosen(fields, "DeepseekV32ForCausalLM", each, 163840)


def read_glm_dsa_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class GlmMoeDsa (GLM-5)."""
    fields.ignore("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    fields.ignore("indexer_rope_interleave", "index_share_for_mtp_iteration")
    each = read_routed_layers(fields, **_GLM)
    sizes: dict[str, Any] = {"q_rank": 2048, "sizes": (192, 64, 256)}
    return _read_chosen(fields, "GlmMoeDsaForCausalLM", each, 202752, norm_eps=1e-5, **sizes)


def read_glm_lite_spec(fields: ConfigFields) -> ModelSpec:
    """The model of config.json of the class Glm4MoeLite (GLM-4.7-Flash)."""
    is_interleaved = fields.boolean("rope_interleave", True)
    experts: dict[str, Any] = {**_GLM, "num_experts": 64, "per_token": 4, "num_dense": 1, "scale": 1.8}
    each = read_routed_layers(fields, **experts)
    sizes: dict[str, Any] = {"q_rank": 768, "sizes": (192, 64, 256), "is_interleaved": is_interleaved}
    return _read(fields, "Glm4MoeLiteForCausalLM", each, 202752, norm_eps=1e-5, **sizes)


def _read_chosen(
    fields: ConfigFields, name: str, each: list[DenseSpec | ExpertsSpec], positions: int, **options: Any
) -> ModelSpec:
    fields.ignore("index_head_dim", "index_n_heads", "layer_types")
    fields.only("mlp_bias", False)
    most = fields.integer("index_topk", 2048)
    spec = _read(fields, name, each, positions, **options)
    indexers = tuple(f"{spec.layer_prefix.format(index)}.self_attn.indexer." for index in range(len(each)))
    return replace(spec, most_keys=most, unused_tensors=spec.unused_tensors + indexers)


def _read(
    fields: ConfigFields,
    name: str,
    each: list[DenseSpec | ExpertsSpec],
    positions: int,
    norm_eps: float = 1e-6,
    **options: Any,
) -> ModelSpec:
    positions = fields.integer("max_position_embeddings", positions)
    attention, rope = read_latent_attention(fields, positions, **options)
    layers = [LayerSpec(attention=attention, ffn=ffn) for ffn in each]
    unused = skip_predicting_layers(fields)
    return read_model(fields, name, layers, positions, norm_eps=norm_eps, rope=rope, unused_tensors=unused)
