"""What of a ModelSpec the layers and operations here cover. The rest is refused at load, never left out."""

from __future__ import annotations

from functools import cache
from typing import cast

import msgspec

from ...ipc.errors import ModelError
from ...ipc.spec.model_spec import (
    AttentionSpec,
    BranchNormsSpec,
    DenseSpec,
    EmbeddingSpec,
    ExpertsSpec,
    ExpertStackSpec,
    LatentSpec,
    LayerInputSpec,
    LayerSpec,
    ModelSpec,
    PerLayerInputsSpec,
    PoolingSpec,
    ProjectionSpec,
    RelativeBiasSpec,
    RopeConfig,
    StageSpec,
    has_dynamic_rope,
)
from ...ipc.spec.recurrent_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from ...ipc.spec.weight_format import WeightFormat, WeightFormats

# Fields that builder.py reads, by struct. Another one must keep its default.
_COVERED: dict[type[msgspec.Struct], str] = {
    ModelSpec: "architecture vocab_size hidden_size layers norm_eps norm_weight_offset norm_rounds_normed"
    " norm_kind norm_bias rope embedding relative_bias embedding_scale max_position_embeddings logit_scale"
    " logit_soft_cap tie_word_embeddings lm_head_bias norm_has_weight transposed_linears optional_prefix"
    " stored_prefixes unused_tensors layer_prefix norm has_logits pooling"
    " stage most_keys weight_formats per_layer_inputs kv_windows",
    EmbeddingSpec: "tokens positions position_offset types num_types norm",
    StageSpec: "first_layer is_first is_last",
    RelativeBiasSpec: "name num_buckets max_distance",
    LayerSpec: "attention recurrent ffn attention_norm attention_out_norm ffn_norm ffn_out_norm norms_sum"
    " is_parallel residual_scale layer_input scalar",
    LayerInputSpec: "gate projection norm activation",
    PerLayerInputsSpec: "size num_rows tokens projection norm",
    BranchNormsSpec: " ".join(BranchNormsSpec.__struct_fields__),
    AttentionSpec: "num_heads num_kv_heads head_size window scale soft_cap qkv_bias o_bias qk_norm is_causal"
    " has_gate norms_rotated qk_norm_has_weight norms_values kv_layer rope qkv qkv_by_group out q_norm k_norm"
    " sinks latent kv_group",
    Mamba2Spec: " ".join(Mamba2Spec.__struct_fields__),
    ShortConvSpec: " ".join(ShortConvSpec.__struct_fields__),
    DeltaNetSpec: " ".join(DeltaNetSpec.__struct_fields__),
    LatentSpec: " ".join(LatentSpec.__struct_fields__),
    DenseSpec: "intermediate_size activation bias gate up down down_bias is_gated fused xielu",
    ExpertsSpec: " ".join(ExpertsSpec.__struct_fields__),
    ExpertStackSpec: " ".join(ExpertStackSpec.__struct_fields__),
    PoolingSpec: "pools projections normalize is_matryoshka matryoshka_dimensions num_labels activation",
    ProjectionSpec: " ".join(ProjectionSpec.__struct_fields__),
    RopeConfig: " ".join(RopeConfig.__struct_fields__),
    WeightFormats: " ".join(WeightFormats.__struct_fields__),
    WeightFormat: " ".join(WeightFormat.__struct_fields__),
}

_find_fields = cache(msgspec.structs.fields)  # of a model's 300 structs, which are of ten kinds


def check_covered(spec: ModelSpec) -> None:
    """ModelError names the first field whose value would be left out of the computation."""
    _check_part(spec, "spec")
    first = spec.layers[0]
    # A step's own angles have one size, and an encoder's layers share two layers' blocks.
    same = ("is_causal",) if spec.is_causal and not has_dynamic_rope(spec) else ("is_causal", "head_size")
    for index, layer in enumerate(spec.layers):
        where = f"spec.layers[{index}]"
        for field in same:
            _check_same(
                getattr(layer.attention, field), getattr(first.attention, field), f"{where}.attention.{field}"
            )
        _check_same(layer.norms_sum, first.norms_sum, f"{where}.norms_sum")
        if layer.recurrent is not None and layer.attention.num_heads:
            raise ModelError(f"{where}.recurrent", type(layer.recurrent).__name__, "None beside attention")
        if layer.attention.norms_rotated and layer.attention.qk_norm != "each_head":
            raise ModelError(f"{where}.attention.norms_rotated", True, "false without norms of each head")
        if layer.is_parallel or layer.norms_sum:
            fields = ("residual_scale", "scalar", "layer_input")
            for field in fields + (("attention_out_norm", "ffn_out_norm") if layer.is_parallel else ()):
                if (value := getattr(layer, field)) is not None:
                    raise ModelError(f"{where}.{field}", value, "None in a layer of this kind")
        _check_shared(spec, index, where)
    if first.norms_sum != (spec.norm is None):
        raise ModelError("spec.norm", spec.norm, "None with layers that norm the sum, a name with others")


def _check_shared(spec: ModelSpec, index: int, where: str) -> None:
    """A layer that reads another's keys and values."""
    layer = spec.layers[index]
    source = layer.attention.kv_layer
    if source is None:
        return
    allowed = [
        number
        for number, other in enumerate(spec.layers[:index])
        if other.attention.keeps_kv
        and (other.attention.num_kv_heads, other.attention.head_size)
        == (layer.attention.num_kv_heads, layer.attention.head_size)
    ]
    if source not in allowed or len(layer.attention.qkv) > 1 or layer.attention.qk_norm == "all_heads":
        raise ModelError(f"{where}.attention.kv_layer", source, f"one of {allowed}, with queries only")
    if layer.attention.norms_values or spec.rope.query_scale_beta is not None:
        raise ModelError(f"{where}.attention.kv_layer", source, "None with norms_values or query_scale_beta")


def _check_same(value: object, first: object, where: str) -> None:
    if value != first:
        raise ModelError(where, value, f"{first}, as of the layers before it")


def _check_part(part: msgspec.Struct, path: str) -> None:
    covered = _COVERED.get(type(part))
    if covered is None:
        raise ModelError(path, type(part).__name__, "a part of the model that the worker computes")
    for field in _find_fields(type(part)):
        value, where = getattr(part, field.name), f"{path}.{field.name}"
        if field.name not in covered.split():
            if value != field.default:
                raise ModelError(where, value, f"{field.default!r}: the worker has no operation for it")
        elif isinstance(value, msgspec.Struct):
            _check_part(value, where)
        elif isinstance(value, tuple):
            for index, item in enumerate(cast(tuple[object, ...], value)):
                if isinstance(item, msgspec.Struct):
                    _check_part(item, f"{where}[{index}]")
