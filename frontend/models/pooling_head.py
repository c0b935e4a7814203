"""What an engine answers with: `runner` and `convert` (vLLM's names) held against what the model has.

A model generates, pools, or does both; the spec that comes out of here says so, and nothing else asks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from ...ipc.errors import ConfigError, ModelError
from ...ipc.spec.model_spec import Convert, ModelSpec, Pool, PoolingSpec, ProjectionSpec, Runner
from .families.config_fields import ConfigFields
from .model_files import MAX_TOKENIZER_BYTES, read_json_as
from .sentence_transformers import (
    MODULES,
    Modules,
    check_transformer,
    read_cross_encoder_activation,
    read_modules,
    read_pooling_modules,
    read_score_tokens,
)

# vLLM's names of pools in `pooler_config`.
_POOLS: dict[str, Pool] = {"CLS": "cls", "LAST": "last", "MEAN": "mean", "ALL": "all"}
_SWITCHES = ("use_activation", "normalize", "softmax", "activation")  # one switch, by its names over time
# What a causal model is asked for in place of a classifier's layer, where nobody says: Qwen3-Reranker's.
_YES_NO = ("no", "yes")
_WORDS = "classifier_from_token"  # vLLM's key of config.json for other ones


@dataclass(frozen=True, slots=True)
class HeadChoice:
    """What the user asked for; `pooler` is pooler_config as an object, {} for none."""

    runner: Runner = "auto"
    convert: Convert = "auto"
    pooler: Mapping[str, Any] = field(default_factory=dict[str, Any])


def choose_heads(
    spec: ModelSpec, choice: HeadChoice, folder: Path, config: Mapping[str, Any], load_weights: bool = True
) -> ModelSpec:
    """The model with the heads that its engine has. `folder` is the model's, `config` its config.json.

    auto: a model without a language head pools, and one whose folder has sentence-transformers' modules; any
    other generates. With runner "generate" a model may be converted too, and then does both. Raises
    ConfigError for what the model cannot do, ModelError for a file that cannot be used.
    """
    generates = choice.runner == "generate"
    if generates and not spec.has_logits:
        raise ConfigError("runner", "generate", f"'pooling': {spec.architecture} has no language head")
    is_asked = choice.runner == "pooling" or choice.convert in ("embed", "classify") or _WORDS in config
    if generates and choice.convert in ("auto", "none"):
        return spec
    modules = read_modules(folder)
    if not is_asked and spec.has_logits and modules is None:
        return spec
    check_transformer(folder)
    finder = _HeadFinder(spec, folder, config, modules, load_weights)
    head = _adjust(finder.find(choice.convert), choice.pooler)
    return replace(
        spec,
        has_logits=generates,
        pooling=_add_matryoshka(head, config, spec),
        unused_tensors=(*spec.unused_tensors, *finder.list_unused(head, generates)),
    )


class _HeadFinder:
    """Finds a model's pooling head in its spec, its folder's modules, or among vLLM's defaults."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        config: Mapping[str, Any],
        modules: Modules | None,
        load_weights: bool,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._config = config
        self._modules = modules
        self._load_weights = load_weights

    def find(self, convert: Convert) -> PoolingSpec:
        pooling, modules = self._spec.pooling, self._modules
        if pooling is not None and convert != "embed" and not self._has_words:
            activation = read_cross_encoder_activation(self._folder)
            return pooling if activation is None else replace(pooling, activation=activation)
        is_scored = self._has_words or (modules is not None and "LogitScore" in modules.kinds)
        if convert == "classify" or (is_scored and convert != "embed"):
            return self._find_scores()
        if convert == "none" and self._spec.has_logits and modules is None:
            text = f"'embed' or 'classify': {self._spec.architecture} has no pooling head of its own"
            raise ConfigError("convert", convert, text)
        return self._find_embedding()

    @property
    def _has_words(self) -> bool:
        return _WORDS in self._config

    def list_unused(self, head: PoolingSpec, generates: bool) -> list[str]:
        """Beginnings of the names of heads that the checkpoint has and this engine has not."""
        pooling = self._spec.pooling
        dropped = [f"{each.name}." for each in pooling.projections] if pooling is not None else []
        taken = {f"{each.name}." for each in head.projections}
        return [name for name in dropped if name not in taken] + ([] if generates else ["lm_head."])

    def _find_embedding(self) -> PoolingSpec:
        spec, modules = self._spec, self._modules
        if modules is not None:
            pooling = read_pooling_modules(self._folder, modules, spec.hidden_size, self._load_weights)
            if pooling is not None:
                return pooling
        return PoolingSpec(pools=("last" if spec.is_causal else "cls",), normalize=True)

    def _find_scores(self) -> PoolingSpec:
        """A causal model as a reranker: the logit of yes against that of no, at a prompt's last token."""
        spec = self._spec
        if not spec.is_causal or not (spec.has_logits or self._has_words):
            raise ConfigError("convert", "classify", f"'embed': {spec.architecture} has no classifier")
        tokens = None if self._modules is None else read_score_tokens(self._folder, self._modules)
        yes, no = tokens or _look_up_tokens(self._folder, self._config)
        for token in (yes, no):
            if token >= spec.vocab_size:
                raise ModelError("LogitScore", token, f"a token id below {spec.vocab_size}")
        row = ProjectionSpec(
            name=spec.embedding.tokens if spec.tie_word_embeddings else "lm_head",
            in_size=spec.hidden_size,
            out_size=1,
            bias=False,
            token_rows=(yes, no),
        )
        activation = read_cross_encoder_activation(self._folder) or "sigmoid"
        return PoolingSpec(pools=("last",), projections=(row,), num_labels=1, activation=activation)


def has_score_tokens(folder: Path) -> bool:
    """Whether a causal model of this folder can be converted into a classifier without further words."""
    try:
        _look_up_tokens(folder, {})
    except (ConfigError, ModelError):
        return False
    return True


def _look_up_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """(yes, no), the ids of the words (no, yes)."""
    value: Any = config.get(_WORDS, _YES_NO)
    words = cast(list[Any], list(value)) if isinstance(value, (list, tuple)) else []
    if len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise ModelError(f"config.json {_WORDS}", value, "two tokens, [no, yes]")
    file = folder / "tokenizer.json"
    try:
        vocab = read_json_as(file, MAX_TOKENIZER_BYTES, _Tokenizer).model.vocab
    except FileNotFoundError:
        raise ModelError("tokenizer", str(folder), "a folder with a tokenizer.json") from None
    for word in words:
        if word in vocab:
            continue
        if _WORDS in config:
            raise ModelError(f"config.json {_WORDS}", word, "a token of the tokenizer")
        remedy = f"hf_overrides={{{_WORDS!r}: [no, yes]}} with two tokens of this model"
        raise ConfigError("convert", "classify", f"{remedy}, whose tokenizer has no {word!r}")
    return vocab[words[1]], vocab[words[0]]


class _Vocab(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that has the ids of tokens."""

    model: _Vocab


def _adjust(head: PoolingSpec, pooler: Mapping[str, Any]) -> PoolingSpec:
    """The head with what pooler_config says in its place."""
    for key, value in pooler.items():
        name = f"pooler_config.{key}"
        if key in ("pooling_type", "seq_pooling_type"):
            if not isinstance(value, str) or value not in _POOLS:
                raise ConfigError(name, value, f"one of {', '.join(_POOLS)}")
            if len(head.pools) > 1 and head.projections:
                raise ConfigError(name, value, f"absent: {MODULES} projects {len(head.pools)} pools")
            head = replace(head, pools=(_POOLS[value],))
        elif key in _SWITCHES:
            if not isinstance(value, bool):
                raise ConfigError(name, value, "true or false")
            if head.num_labels:
                head = head if value else replace(head, activation="identity")
            else:
                head = replace(head, normalize=value)
        else:
            raise ConfigError(name, value, f"no such key; there are pooling_type, {', '.join(_SWITCHES)}")
    return head


def _add_matryoshka(head: PoolingSpec, config: Mapping[str, Any], spec: ModelSpec) -> PoolingSpec:
    """The head with the dimensions that vectors may be cut to, by vLLM's keys of config.json."""
    fields = ConfigFields(config)
    named: Any = fields.get("matryoshka_dimensions")
    if named is None:
        return replace(head, is_matryoshka=fields.boolean("is_matryoshka", False))
    width = head.count_width(spec.hidden_size)
    sizes = cast(list[Any], named) if isinstance(named, list) else []
    if not sizes or not all(type(size) is int and 1 <= size <= width for size in sizes):
        raise fields.error("matryoshka_dimensions", named, f"a list of integers from 1 to {width}")
    return replace(head, is_matryoshka=True, matryoshka_dimensions=tuple(sorted(set(sizes))))
