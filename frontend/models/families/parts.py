"""What families share: readers of the parts of a decoder that many of them spell alike in config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ....ipc.spec.model_spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    RopeConfig,
    has_dynamic_rope,
)
from .config_fields import ConfigFields
from .rope import read_rope

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
MAX_LAYERS = 10_000  # each is written out; no published model has a tenth of it
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_model(
    fields: ConfigFields,
    architecture: str,
    layers: Sequence[LayerSpec],
    max_positions: int,
    *,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    rope: RopeConfig | None = None,
    tie_word_embeddings: bool = False,
    **computed: Any,
) -> ModelSpec:
    """The whole of `layers`; the numbers and `tie_word_embeddings` are the family's defaults.

    `rope` and `computed` are fields of ModelSpec that the family has read itself.
    """
    # Granite's, and windows of a family whose layers have none or always: transformers computes without them.
    fields.ignore("logits_scaling", "sliding_window", "use_sliding_window", "max_window_layers")
    max_positions = fields.integer("max_position_embeddings", max_positions)
    rope = read_rope(fields, max_positions, rope_theta) if rope is None else rope
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=tuple(layers),
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        max_position_embeddings=max_positions,
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tie_word_embeddings),
        **computed,
    )
    head_size = max(layer.attention.head_size for layer in layers)
    if has_dynamic_rope(spec) and head_size <= 2:  # the grown base's exponent has head_size - 2 as divisor
        raise fields.error("head_dim", head_size, "above 2 with dynamic rope scaling")
    return spec


def read_attention(
    fields: ConfigFields,
    *,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    may_have_bias: bool = False,
) -> AttentionSpec:
    """Heads of a layer; the defaults are the family's, None as many as heads and hidden_size / heads.

    `may_have_bias`: on all four projections if `attention_bias` says so.
    """
    num_heads = fields.integer("num_attention_heads")
    if "num_key_value_heads" in fields:  # null means as many as heads, in every family
        num_kv_heads = num_heads
    num_kv_heads = fields.integer("num_key_value_heads", num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} attention heads")
    hidden_size = fields.integer("hidden_size")
    default = head_size if "head_dim" not in fields else None
    if default is None and fields.get("head_dim") is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", hidden_size, f"a multiple of num_attention_heads={num_heads}")
        default = hidden_size // num_heads
    head_size = fields.integer("head_dim", default)
    if head_size % 2:
        raise fields.error("head_dim", head_size, "an even number (rotary embedding turns pairs)")
    bias = may_have_bias and fields.boolean("attention_bias", False)
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, qkv_bias=bias, o_bias=bias
    )


def read_dense(
    fields: ConfigFields, *, activation_key: str = "hidden_act", activation: str = "silu"
) -> DenseSpec:
    """The feed-forward part of a layer; `activation` is the family's default."""
    return DenseSpec(
        intermediate_size=fields.integer("intermediate_size"),
        activation=read_activation(fields, activation_key, activation),
    )


def read_plain(
    fields: ConfigFields,
    *,
    activation: str,
    up: str = "mlp.up_proj",
    down: str = "mlp.down_proj",
    width: int | None = None,
) -> DenseSpec:
    """A feed-forward part without a gate; `activation` and `width` are the family's defaults."""
    return DenseSpec(
        intermediate_size=fields.integer("intermediate_size", width),
        activation=read_activation(fields, default=activation),
        is_gated=False,
        up=up,
        down=down,
    )


def read_activation(fields: ConfigFields, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation that the key names."""
    name = fields.get(key)
    activation = ACTIVATIONS.get(default if name is None else str(name))
    if activation is None:
        raise fields.error(key, name, f"one of {', '.join(ACTIVATIONS)}")
    return activation


def read_num_layers(fields: ConfigFields) -> int:
    """How many layers the model has."""
    return fields.integer("num_hidden_layers", high=MAX_LAYERS)


def read_window(fields: ConfigFields, default: int | None) -> int | None:
    """The attention window in tokens, None for null."""
    if fields.get("sliding_window") is None and ("sliding_window" in fields or default is None):
        return None
    return fields.integer("sliding_window", default)


def read_layer_types(fields: ConfigFields, is_sliding: Sequence[bool], other: str = _SLIDING) -> list[bool]:
    """Which layers are of the kind `other`, usually the window's, one entry a layer.

    `is_sliding` is for checkpoints that do not say.
    """
    kinds = fields.get("layer_types")
    if kinds is None:
        return list(is_sliding)
    allowed = f"{len(is_sliding)} of {_FULL!r} and {other!r}"
    if not isinstance(kinds, list) or len(cast(list[Any], kinds)) != len(is_sliding):
        raise fields.error("layer_types", kinds, allowed)
    for kind in cast(list[Any], kinds):
        if kind not in (_FULL, other):
            raise fields.error("layer_types", kind, allowed)
    return [kind == other for kind in cast(list[Any], kinds)]
