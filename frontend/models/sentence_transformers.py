"""What sentence-transformers' files in a model's folder say: modules behind it, prompts, limits, labels.

Reads files and imports nothing that they name: a module or an activation is one of those written here, or it
is refused by its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from ...ipc.errors import ModelError
from ...ipc.spec.model_spec import HeadActivation, Pool, PoolingSpec, ProjectionSpec
from .families.config_fields import ConfigFields
from .families.encoders import ENCODERS
from .families.heads import read_torch_activation
from .model_files import MAX_JSON_BYTES, MAX_TEMPLATE_BYTES, read_file, read_json, read_json_as
from .model_folder import read_header

MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_MAX_MODULES = 64
_MAX_SIZE = 1 << 20  # numbers of a vector
# By the class' name; the packages that it is named within have changed.
ModuleKind = Literal["Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore"]
_PACKAGES = ("sentence_transformers.", "pylate.models.")
# In this order, each at most once but for Dense.
_ORDER: tuple[ModuleKind, ...] = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
_POOLS: dict[str, Pool] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# One switch a pool in files from before 5.5, in the order of their vectors.
_OLD_POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
)


# Where a module's input is found and its output put, by sentence-transformers' names.
_OF_TOKENS, _OF_TEXTS, _SCORES = "token_embeddings", "sentence_embedding", "scores"
# What its Transformer may do of what is done here; other tasks make other vectors of the same weights.
_TASKS = ("feature-extraction", "sequence-classification", "text-generation")
_MODULE_OUTPUTS = (_OF_TOKENS, _SCORES, "causal_logits")
_MODEL_OUTPUTS = ("last_hidden_state", "logits")
# Arguments for transformers that a Transformer is saved with; any other would change config.json.
_ARGUMENTS = ("model_args", "model_kwargs", "config_args", "config_kwargs")
_HARMLESS_ARGUMENT = re.compile(
    r"add_pooling_layer|attn_implementation|cache_dir|(code_)?revision|device_map|(torch_)?dtype"
    r"|local_files_only|low_cpu_mem_usage|token|trust_remote_code|unpad_inputs|use_cache"
    r"|use_memory_efficient_attention|use_safetensors|variant"
)
# Likewise for the tokenizer; any other would make other tokens.
_TOKENIZER_CALLS = ("common", "text", "chat_template")
_HARMLESS_TOKENIZER_ARGUMENT = re.compile(
    r"add_generation_prompt|logits_to_keep|pad_to_multiple_of|padding|restore_suffix|return_tensors|truncation"
)
_QWEN3_RERANKER_TEXT = "Judge whether the Document meets the requirements"  # of Qwen3-Reranker's template


@dataclass(frozen=True, slots=True)
class Modules:
    """modules.json in order; `paths` are within the model's folder, '' is the folder itself."""

    kinds: tuple[ModuleKind, ...]
    paths: tuple[str, ...]

    def find(self, kind: ModuleKind) -> list[str]:
        """The paths of all modules of a kind."""
        return [path for each, path in zip(self.kinds, self.paths, strict=True) if each == kind]


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """What a frontend does with texts before they are tokens, and what scores are called."""

    prompts: dict[str, str] = field(default_factory=dict[str, str])  # put before a text, by name
    default_prompt_name: str | None = None
    max_seq_length: int | None = None  # tokens that the model was made for
    do_lower_case: bool = False  # of the text, before the tokenizer
    labels: tuple[str, ...] = ()  # of a classifier's scores, in their order
    pair_prompt: str = ""  # before the first text of a cross-encoder's pair
    fills_template: bool = False  # with pairs: Qwen3-Reranker's
    trailing_padding_id: int | None = None  # token that a decoder's classifier passes over at a prompt's end


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_modules(folder: Path) -> Modules | None:
    """modules.json, None if there is none; ModelError for a module that is not known, or out of place."""
    try:
        entries = read_json_as(folder / MODULES, MAX_JSON_BYTES, list[_Module])
    except FileNotFoundError:
        return None
    if not 1 <= len(entries) <= _MAX_MODULES:
        raise ModelError(MODULES, f"{len(entries)} modules", f"1 to {_MAX_MODULES}")
    kinds: list[ModuleKind] = [_read_kind(index, entry.type) for index, entry in enumerate(entries)]
    for entry in entries:
        path = Path(entry.path)
        if ".." in path.parts or path.is_absolute() or "\0" in entry.path:
            raise ModelError(f"{MODULES} path", entry.path, "a folder within the model's")
    _check_order(kinds)
    return Modules(tuple(kinds), tuple(entry.path for entry in entries))


def find_transformer_folder(folder: Path) -> Path:
    """Where config.json, weights and tokenizer are: the folder itself, or what modules.json names.

    The oldest ones have a config.json beside modules.json that says sentence-transformers' version only.
    """
    config = read_json(folder / "config.json")
    if "model_type" in config or "architectures" in config:
        return folder
    modules = read_modules(folder)
    return folder / modules.paths[0] if modules is not None else folder


def read_pooling_modules(
    folder: Path, modules: Modules, hidden_size: int, load_weights: bool = True
) -> PoolingSpec | None:
    """The head that the modules are, None where they are the model and nothing else.

    `hidden_size` is the model's. Raises ModelError by file and key. With `load_weights` the weights of dense
    modules are checked as the model's are.
    """
    pools: tuple[Pool, ...] = ("all",)
    if len(modules.kinds) == 1 or "LogitScore" in modules.kinds:
        return None
    for path in modules.find("Pooling"):
        pools = _read_pools(folder / path / "config.json", hidden_size)
    width = hidden_size * len(pools)
    is_scored = _is_cross_encoder(folder)
    place = _OF_TOKENS if pools == ("all",) else _OF_TEXTS
    projections: list[ProjectionSpec] = []
    paths = modules.find("Dense")
    for index, path in enumerate(paths, 1):
        output = _SCORES if is_scored and index == len(paths) else place
        _check_places(_open(folder / path / "config.json"), place, output)
        projections.append(_read_dense(folder, path, width, load_weights))
        width = projections[-1].out_size
    for path in filter(None, modules.find("Normalize")):
        _check_places(_open(folder / path / "config.json"), place, place)
    return PoolingSpec(
        pools=pools,
        projections=tuple(projections),
        normalize="Normalize" in modules.kinds,
        num_labels=width if is_scored else 0,
        activation=read_cross_encoder_activation(folder) or "identity",
    )


def read_score_tokens(folder: Path, modules: Modules) -> tuple[int, int] | None:
    """(token of yes, token of no) whose logits' difference is the score, None without such a module."""
    for path in modules.find("LogitScore"):
        fields = _open(folder / path / "config.json")
        return fields.integer("true_token_id", low=0), fields.integer("false_token_id", low=0)
    return None


def read_cross_encoder_activation(folder: Path) -> HeadActivation | None:
    """What a CrossEncoder was saved with, None if the folder does not say."""
    name = read_json(folder / _SETTINGS).get("activation_fn") if _is_cross_encoder(folder) else None
    return None if name is None else read_torch_activation(f"{_SETTINGS} activation_fn", name)


def check_transformer(folder: Path) -> None:
    """Raise ModelError by file and key for a Transformer that computes something else than is done here, and
    for vectors that are always cut.
    """
    of_folder = ConfigFields(read_json(folder / _SETTINGS), file=_SETTINGS)
    of_folder.only("truncate_dim", None)  # after they are normalised; `dimensions` are cut before
    transformer = find_transformer_folder(folder)
    settings = _read_settings(transformer)
    if (task := settings.get("transformer_task", _TASKS[0])) not in _TASKS:
        raise settings.error("transformer_task", task, f"one of {', '.join(_TASKS)}")
    if (output := settings.get("module_output_name", _OF_TOKENS)) not in _MODULE_OUTPUTS:
        raise settings.error("module_output_name", output, f"one of {', '.join(_MODULE_OUTPUTS)}")
    if settings.get("query_expansion"):
        raise settings.error("query_expansion", settings.get("query_expansion"), "null")
    for kind, method in _read_modalities(settings).items():
        output = method.get("method_output_name", _MODEL_OUTPUTS[0])
        if method.get("method", "forward") != "forward" or output not in _MODEL_OUTPUTS:
            allowed = f"forward with {' or '.join(_MODEL_OUTPUTS)}"
            raise settings.error(f"modality_config.{kind}", method, allowed)
    for kind, arguments in _read_object(settings, "processing_kwargs").items():
        if not isinstance(arguments, dict):
            raise settings.error(f"processing_kwargs.{kind}", arguments, "an object")
        for name, value in cast(dict[str, Any], arguments).items():
            if kind in _TOKENIZER_CALLS and not _HARMLESS_TOKENIZER_ARGUMENT.fullmatch(name):
                raise settings.error(f"processing_kwargs.{kind}.{name}", value, "absent")
    config = read_json(transformer / "config.json")
    for key in _ARGUMENTS:
        for name, value in _read_object(settings, key).items():
            if not _HARMLESS_ARGUMENT.fullmatch(name) and value != config.get(name):
                allowed = f"absent, or {config.get(name)!r} as config.json has it"
                raise settings.error(f"{key}.{name}", value, allowed)
    if _takes_messages(settings) and not _is_qwen3_reranker(transformer, config):
        allowed = "without 'message', or Qwen3-Reranker's: its is the only template here"
        raise settings.error("modality_config", settings.get("modality_config"), allowed)


def read_text_encoding(folder: Path) -> TextEncoding:
    """Prompts, limits and labels of a model's folder, which need not be sentence-transformers'."""
    transformer = find_transformer_folder(folder)
    settings = ConfigFields(read_json(folder / _SETTINGS), file=_SETTINGS)
    prompts: Any = settings.get("prompts", {})
    is_text = isinstance(prompts, dict) and all(
        isinstance(text, (str, type(None))) for text in cast(dict[str, Any], prompts).values()
    )
    if not is_text:
        raise settings.error("prompts", prompts, "an object of texts")
    named = {name: text or "" for name, text in cast(dict[str, str | None], prompts).items()}
    default = settings.get("default_prompt_name")
    if default is not None and default not in list(named):  # which it may be no key of
        raise settings.error(
            "default_prompt_name", default, f"null or one of {', '.join(named) or 'no prompts'}"
        )
    limits, config = _read_settings(transformer), read_json(transformer / "config.json")
    has_classifier = "ForSequenceClassification" in str(config.get("architectures"))
    return TextEncoding(
        prompts=named,
        default_prompt_name=default,
        max_seq_length=_read_max_seq_length(transformer, limits),
        do_lower_case=limits.boolean("do_lower_case", False),
        labels=_read_labels(config),
        pair_prompt=named.get(default or "", "") if _is_cross_encoder(folder) else "",
        fills_template=config.get("model_type") == "qwen3"
        and (_takes_messages(limits) or not has_classifier),
        trailing_padding_id=_read_padding(config) if has_classifier else None,
    )


def _read_kind(index: int, name: str) -> ModuleKind:
    last = name.rpartition(".")[2]
    for kind in get_args(ModuleKind):
        if last == kind and name.startswith(_PACKAGES):
            return kind
    allowed = f"sentence_transformers' {', '.join(get_args(ModuleKind))}"
    raise ModelError(f"{MODULES} [{index}].type", name, allowed)


def _check_order(kinds: list[ModuleKind]) -> None:
    places = [_ORDER.index(kind) for kind in kinds if kind != "Dropout"]
    dense = _ORDER.index("Dense")
    is_ordered = all(a < b or a == b == dense for a, b in pairwise(places))
    if places[:1] != [0] or not is_ordered:
        raise ModelError(MODULES, ", ".join(kinds), f"modules in the order {', '.join(_ORDER)}")


def _open(file: Path) -> ConfigFields:
    """A JSON object's fields; errors name the file with its folder."""
    return ConfigFields(read_json(file), file=f"{file.parent.name}/{file.name}")


def _read_pools(file: Path, hidden_size: int) -> tuple[Pool, ...]:
    """Raises ModelError also for a file that is not there, or that says no pool."""
    if not file.exists():
        raise ModelError(f"{MODULES} path", file.parent.name, "a folder with the pooling's config.json")
    fields = _open(file)
    width = fields.get("embedding_dimension", fields.get("word_embedding_dimension", hidden_size))
    if width != hidden_size:
        raise fields.error("embedding_dimension", width, f"{hidden_size}, the model's hidden_size")
    named: Any = fields.get("pooling_mode")
    if named is None:
        pools: list[Pool] = [pool for key, pool in _OLD_POOLS.items() if fields.boolean(key, False)]
        if not pools and not fields.boolean("pooling_mode_mean_tokens", True):
            raise fields.error("pooling_mode_mean_tokens", False, "true, or another pooling_mode_... that is")
        return tuple(pools) or ("mean",)
    names = cast(list[Any], named) if isinstance(named, list) else [named]
    if not 1 <= len(names) <= len(_POOLS) or not all(isinstance(n, str) and n in _POOLS for n in names):
        raise fields.error("pooling_mode", named, f"one or some of {', '.join(_POOLS)}")
    return tuple(_POOLS[name] for name in names)


def _read_dense(folder: Path, path: str, width: int, load_weights: bool) -> ProjectionSpec:
    fields = _open(folder / path / "config.json")
    if (in_size := fields.integer("in_features", high=_MAX_SIZE)) != width:
        raise fields.error("in_features", in_size, f"{width}, the numbers of the module before it")
    if fields.boolean("use_residual", False):
        raise fields.error("use_residual", True, "false")
    file = Path(path) / "model.safetensors"
    if load_weights:
        if not (folder / file).is_file():
            raise ModelError("model", str(folder / file), "a file: weights are read from safetensors only")
        read_header(folder / file)
    name = fields.get("activation_function", "torch.nn.modules.activation.Tanh")
    return ProjectionSpec(
        name="linear",
        in_size=in_size,
        out_size=fields.integer("out_features", high=_MAX_SIZE),
        bias=fields.boolean("bias", True),
        activation=read_torch_activation(f"{path}/config.json activation_function", name),
        file=str(file),
    )


def _is_cross_encoder(folder: Path) -> bool:
    return read_json(folder / _SETTINGS).get("model_type") == "CrossEncoder"


def _check_places(fields: ConfigFields, place: str, output: str) -> None:
    """Refuse a module that reads another module's output than that of the one before it, or hides its own."""
    if (value := fields.get("module_input_name", place)) != place:
        raise fields.error("module_input_name", value, repr(place))
    if (value := fields.get("module_output_name", output)) != output:
        raise fields.error("module_output_name", value, repr(output))


def _read_object(settings: ConfigFields, key: str) -> dict[str, Any]:
    value: Any = settings.get(key, {})
    if not isinstance(value, dict):
        raise settings.error(key, value, "an object")
    return cast(dict[str, Any], value)


def _read_modalities(settings: ConfigFields) -> dict[str, dict[str, Any]]:
    """The entries for what is served here: texts, and conversations in their place."""
    modalities = _read_object(settings, "modality_config")
    for value in modalities.values():
        if not isinstance(value, dict):
            raise settings.error("modality_config", modalities, "an object of objects")
    return {kind: value for kind, value in modalities.items() if kind in ("text", "message")}


def _takes_messages(settings: ConfigFields) -> bool:
    """Whether texts go through the chat template, as they do wherever conversations are taken."""
    return "message" in _read_modalities(settings)


def _is_qwen3_reranker(transformer: Path, config: dict[str, Any]) -> bool:
    file = transformer / "chat_template.jinja"
    written: Any = read_json(transformer / "tokenizer_config.json").get("chat_template")
    template = read_file(file, MAX_TEMPLATE_BYTES).decode(errors="replace") if file.exists() else str(written)
    return config.get("model_type") == "qwen3" and _QWEN3_RERANKER_TEXT in template


def _read_settings(transformer: Path) -> ConfigFields:
    for name in _TRANSFORMER_CONFIGS:
        if values := read_json(transformer / name):
            return ConfigFields(values, file=name)
    return ConfigFields({}, file=_TRANSFORMER_CONFIGS[0])


def _read_max_seq_length(transformer: Path, limits: ConfigFields) -> int | None:
    """The model's own limit; cross-encoders keep it in the tokenizer's configuration, and all since 5.5."""
    if limits.get("max_seq_length") is not None:
        return limits.integer("max_seq_length")
    most = read_json(transformer / "tokenizer_config.json").get("model_max_length")
    return most if isinstance(most, int) and 1 <= most < 2**31 else None  # larger: nobody has said


def _read_padding(config: dict[str, Any]) -> int | None:
    """transformers' classifiers of decoders read the last token that is no padding, which EOS often is."""
    is_encoder = any(name in ENCODERS for name in cast(list[Any], config.get("architectures")))
    padding: Any = config.get("pad_token_id")
    is_left_out = isinstance(padding, int) and not is_encoder and config.get("is_causal") is not False
    return padding if is_left_out else None


def _read_labels(config: dict[str, Any]) -> tuple[str, ...]:
    """id2label in the order of its numbers; none if config.json has none, or they are not 0, 1, ..."""
    named: Any = config.get("id2label")
    if not isinstance(named, dict):
        return ()
    labels = cast(dict[str, Any], named)
    names = [labels.get(str(index)) for index in range(len(labels))]
    return tuple(str(label) for label in names) if None not in names else ()
