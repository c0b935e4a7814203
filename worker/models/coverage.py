"""What of a ModelSpec the layers and operations here cover. The rest is refused at load, never left out."""

from __future__ import annotations

from typing import cast

import msgspec

from ...ipc.errors import ModelError
from ...ipc.model_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeConfig

# Fields that builder.py reads, by struct. Another one must keep its default.
_COVERED: dict[type[msgspec.Struct], str] = {
    ModelSpec: "architecture vocab_size hidden_size layers norm_eps norm_weight_offset norm_rounds_normed"
    " rope embedding_scale max_position_embeddings logit_soft_cap tie_word_embeddings optional_prefix"
    " unused_tensors",
    LayerSpec: "attention ffn attention_norm attention_out_norm ffn_norm ffn_out_norm",
    AttentionSpec: "num_heads num_kv_heads head_size window scale soft_cap qkv_bias o_bias qk_norm",
    DenseSpec: "intermediate_size activation bias gate up down",
    ExpertsSpec: "num_experts num_experts_per_tok intermediate_size activation norm_topk_prob router gate up"
    " down",
    RopeConfig: " ".join(RopeConfig.__struct_fields__),
}


def check_covered(spec: ModelSpec) -> None:
    """ModelError names the first field whose value would be left out of the computation."""
    _check(spec, "spec")
    head_size = spec.layers[0].attention.head_size
    for index, layer in enumerate(spec.layers):
        if layer.attention.head_size != head_size:
            where = f"spec.layers[{index}].attention.head_size"
            raise ModelError(where, layer.attention.head_size, f"{head_size}, as of the layers before it")


def _check(part: msgspec.Struct, path: str) -> None:
    covered = _COVERED.get(type(part))
    if covered is None:
        raise ModelError(path, type(part).__name__, "a part of the model that the worker computes")
    for field in msgspec.structs.fields(part):
        value, where = getattr(part, field.name), f"{path}.{field.name}"
        if field.name not in covered.split():
            if value != field.default:
                raise ModelError(where, value, f"{field.default!r}: the worker has no operation for it")
        elif isinstance(value, msgspec.Struct):
            _check(value, where)
        elif isinstance(value, tuple):
            for index, item in enumerate(cast(tuple[object, ...], value)):
                if isinstance(item, msgspec.Struct):
                    _check(item, f"{where}[{index}]")
