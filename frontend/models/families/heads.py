"""Heads that pool: what a checkpoint without a language head has behind its layers, as config.json says it.

Classifiers of encoders, `score` and reward heads of decoders, and how scores become probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgspec.structs import replace

from ....ipc.errors import ModelError
from ....ipc.spec.model_spec import HeadActivation, ModelSpec, Pool, PoolingSpec, ProjectionSpec
from .config_fields import ConfigFields

_MAX_LABELS = 100_000
# By the last part of the class' name in torch.nn; nothing is imported by that name.
_TORCH_ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_PROBLEM_TYPES: dict[str, HeadActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
# What sentence-transformers' CrossEncoder has written into config.json: since 4.0, and before.
_CROSS_ENCODER, _OLD_CROSS_ENCODER = "sentence_transformers", "sbert_ce_default_activation_function"

Reader = Callable[[ConfigFields], ModelSpec]


def read_torch_activation(field: str, name: object) -> HeadActivation:
    """The activation that a torch.nn class' full name stands for; ModelError for any other."""
    module, _, last = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    activation = _TORCH_ACTIVATIONS.get(last)
    if activation is None or not (module == "torch.nn" or module.startswith("torch.nn.modules.")):
        allowed = f"torch.nn.modules.*.{{{', '.join(_TORCH_ACTIVATIONS)}}}"
        raise ModelError(field, name, allowed)
    return activation


def read_num_labels(fields: ConfigFields) -> int:
    """How many scores the classifier gives; transformers' default is 2."""
    labels: Any = fields.get("id2label")
    if isinstance(labels, dict) and fields.get("num_labels") is None:
        count = len(cast(dict[Any, Any], labels))
        if not 1 <= count <= _MAX_LABELS:
            raise fields.error("id2label", f"{count} labels", f"1 to {_MAX_LABELS}")
        return count
    return fields.integer("num_labels", 2, high=_MAX_LABELS)


def read_score_activation(fields: ConfigFields, num_labels: int) -> HeadActivation:
    """What makes probabilities of scores: what sentence-transformers wrote, else by the problem's type."""
    written: Any = fields.get(_CROSS_ENCODER)
    name = cast(dict[str, Any], written).get("activation_fn") if isinstance(written, dict) else None
    if name is not None:
        return read_torch_activation(f"config.json {_CROSS_ENCODER}.activation_fn", name)
    if (name := fields.get(_OLD_CROSS_ENCODER)) is not None:
        return read_torch_activation(f"config.json {_OLD_CROSS_ENCODER}", name)
    problem = fields.get("problem_type")
    if problem is not None:
        if not isinstance(problem, str) or problem not in _PROBLEM_TYPES:
            raise fields.error("problem_type", problem, f"null or one of {', '.join(_PROBLEM_TYPES)}")
        if not (problem == "single_label_classification" and num_labels == 1):
            return _PROBLEM_TYPES[problem]
    return "sigmoid" if num_labels == 1 else "softmax"


def make_classifier(
    fields: ConfigFields, pool: Pool, last: str, *before: ProjectionSpec, hidden_size: int, bias: bool = True
) -> PoolingSpec:
    """`last` names the projection to labels, `before` are those between the pool and it."""
    num_labels = read_num_labels(fields)
    scores = ProjectionSpec(name=last, in_size=hidden_size, out_size=num_labels, bias=bias)
    return PoolingSpec(
        pools=(pool,),
        projections=(*before, scores),
        num_labels=num_labels,
        activation=read_score_activation(fields, num_labels),
    )


def make_square(name: str, hidden_size: int, activation: HeadActivation = "tanh") -> ProjectionSpec:
    """The dense layer that most classifiers have before the one to labels."""
    return ProjectionSpec(name=name, in_size=hidden_size, out_size=hidden_size, activation=activation)


def without_head(read: Reader) -> Reader:
    """A reader of the decoder that `read` reads, saved without its language head."""

    def read_backbone(fields: ConfigFields) -> ModelSpec:
        fields.ignore(_OLD_CROSS_ENCODER)
        spec = read(fields)
        return replace(spec, has_logits=False, unused_tensors=(*spec.unused_tensors, "lm_head."))

    return read_backbone


def without_mask(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """The decoder as an encoder, which "is_causal": false says of embedders such as gte-Qwen2."""
    if any(layer.attention.window is not None for layer in spec.layers):
        raise fields.error("is_causal", False, "true for a model with attention windows")
    layers = [replace(layer, attention=replace(layer.attention, is_causal=False)) for layer in spec.layers]
    unused = (*spec.unused_tensors, "lm_head.")
    return replace(spec, layers=tuple(layers), has_logits=False, unused_tensors=unused)


def with_scores(read: Reader) -> Reader:
    """A reader of the decoder with `score` on the last token: transformers' ForSequenceClassification."""

    def read_classifier(fields: ConfigFields) -> ModelSpec:
        spec = without_head(read)(fields)
        head = make_classifier(fields, "last", "score", hidden_size=spec.hidden_size, bias=False)
        return replace(spec, pooling=head)

    return read_classifier


def with_rewards(read: Reader, num_labels: int) -> Reader:
    """A reader of the decoder whose `score` is two layers on every token: Qwen2.5-Math's reward models."""

    def read_reward(fields: ConfigFields) -> ModelSpec:
        spec = without_head(read)(fields)
        hidden = spec.hidden_size
        count = fields.integer("num_labels", num_labels, high=_MAX_LABELS)
        scores = ProjectionSpec(name="score.2", in_size=hidden, out_size=count)
        head = PoolingSpec(
            pools=("all",),
            projections=(make_square("score.0", hidden, "relu"), scores),
            num_labels=count,
            activation="softmax" if count > 1 else "identity",
        )
        return replace(spec, pooling=head)

    return read_reward
