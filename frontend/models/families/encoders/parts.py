"""What encoder families share: readers of parts that many of them spell alike in config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from .....ipc.spec.model_spec import (
    AttentionSpec,
    DenseSpec,
    EmbeddingSpec,
    HeadActivation,
    LayerSpec,
    ModelSpec,
    RopeConfig,
)
from ..config_fields import ConfigFields
from ..heads import Reader, make_classifier, make_square
from ..rope import read_rope

_BERT_KEYS = ("num_attention_heads", "hidden_size", "intermediate_size", "hidden_act")
_EncoderActivation = Literal["silu", "gelu", "gelu_tanh", "relu"]  # of layers and of heads
_ACTIVATIONS: dict[str, _EncoderActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_encoder(
    fields: ConfigFields,
    prefix: str,
    layers: Sequence[LayerSpec],
    *,
    max_positions: int,
    embedding: EmbeddingSpec,
    layer_prefix: str,
    unused: tuple[str, ...],
    norm_eps: float,
    **others: Any,
) -> ModelSpec:
    """A model of `layers` with LayerNorms and without a language head.

    `prefix` is that of the family's tensors, and optional; `embedding` and `layer_prefix` have it. `unused`
    are beginnings of names, with or without the prefix. `others` are fields of ModelSpec. The architecture is
    left for the caller to name.
    """
    fields.ignore("tie_word_embeddings", "sbert_ce_default_activation_function")  # other heads'
    spec = ModelSpec(
        architecture="",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=layers[0].attention.query_size,
        layers=tuple(layers),
        norm_eps=norm_eps,
        max_position_embeddings=max_positions,
        rope=RopeConfig(type="none"),
        norm_kind="layer",
        norm_bias=True,
        embedding=embedding,
        layer_prefix=layer_prefix,
        norm=None,
        optional_prefix=prefix,
        unused_tensors=(*unused, *(prefix + name for name in unused if prefix)),
        has_logits=False,
    )
    return replace(spec, **others)


def with_pooler(read: Reader) -> Reader:
    """A reader of the encoder with a classifier on BERT's pooler."""
    return _with_dense(read, lambda spec: f"{spec.optional_prefix}pooler.dense")


def with_two_layers(read: Reader) -> Reader:
    """A reader of the encoder with RoBERTa's classifier, which MPNet has too."""
    return _with_dense(read, lambda _: "classifier.dense", last="classifier.out_proj")


def with_pre_classifier(read: Reader) -> Reader:
    """A reader of the encoder with DistilBERT's classifier of two layers."""
    return _with_dense(read, lambda _: "pre_classifier", "relu")


def _with_dense(
    read: Reader,
    name_dense: Callable[[ModelSpec], str],
    activation: HeadActivation = "tanh",
    last: str = "classifier",
) -> Reader:
    def read_classifier(fields: ConfigFields) -> ModelSpec:
        spec = read(fields)
        dense = make_square(name_dense(spec), spec.hidden_size, activation)
        head = make_classifier(fields, "cls", last, dense, hidden_size=spec.hidden_size)
        return replace(spec, pooling=head)

    return read_classifier


def check_encoder(fields: ConfigFields) -> None:
    """Refuse what would make a decoder of a BERT, or give it other positions than learned ones."""
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    fields.only("position_embedding_type", "absolute")
    # Of exports of multilingual BERT for TensorFlow, which no version of transformers reads.
    fields.ignore("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")


def read_heads(
    fields: ConfigFields, heads_key: str = "num_attention_heads", size_key: str = "hidden_size"
) -> AttentionSpec:
    """Attention that sees the whole prompt, with as many heads of keys as of queries."""
    num_heads, hidden_size = fields.integer(heads_key), fields.integer(size_key)
    if hidden_size % num_heads:
        raise fields.error(size_key, hidden_size, f"a multiple of {heads_key}={num_heads}")
    head_size = hidden_size // num_heads
    if fields.integer("head_dim", head_size) != head_size:
        raise fields.error("head_dim", fields.get("head_dim"), f"{head_size}, {size_key} by heads")
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_size=head_size, is_causal=False)


def read_plain_layer(
    fields: ConfigFields,
    qkv: tuple[str, str, str],
    out: str,
    norm: str,
    ffn: tuple[str, str, str] = ("intermediate.dense", "output.dense", "output.LayerNorm"),
    keys: tuple[str, str, str, str] = _BERT_KEYS,
) -> LayerSpec:
    """A layer of BERT: biases everywhere, two projections of the feed-forward part, norms of sums.

    `norm` is attention's; `ffn` names that part's projections and its norm. `keys` of config.json: heads,
    hidden size, width, activation.
    """
    heads_key, size_key, width_key, activation_key = keys
    return LayerSpec(
        attention=replace(
            read_heads(fields, heads_key, size_key), qkv_bias=True, o_bias=True, qkv=qkv, out=out
        ),
        ffn=DenseSpec(
            intermediate_size=fields.integer(width_key),
            activation=read_encoder_activation(fields, activation_key),
            bias=True,
            is_gated=False,
            up=ffn[0],
            down=ffn[1],
        ),
        attention_norm=norm,
        ffn_norm=ffn[2],
        norms_sum=True,
    )


def name_embeddings(prefix: str, position_offset: int = 0, num_types: int = 0) -> EmbeddingSpec:
    """BERT's tables and their norm, under a family's prefix; without types there is no table of them."""
    embeddings = f"{prefix}embeddings."
    return EmbeddingSpec(
        tokens=f"{embeddings}word_embeddings",
        positions=f"{embeddings}position_embeddings",
        position_offset=position_offset,
        types=f"{embeddings}token_type_embeddings" if num_types else None,
        num_types=num_types,
        norm=f"{embeddings}LayerNorm",
    )


def read_static_rope(fields: ConfigFields, max_positions: int, theta: float) -> RopeConfig:
    """As of decoders, but for "dynamic": an encoder's angles do not follow the length of a prompt."""
    rope = read_rope(fields, max_positions, theta)
    if rope.type == "dynamic":
        key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
        raise fields.error(key, rope.type, "another type than 'dynamic'")
    return rope


def read_encoder_activation(
    fields: ConfigFields, key: str = "hidden_act", default: str = "gelu"
) -> _EncoderActivation:
    """The activation that the key names."""
    name = fields.get(key, default)
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise fields.error(key, name, f"one of {', '.join(_ACTIVATIONS)}")
    return activation
