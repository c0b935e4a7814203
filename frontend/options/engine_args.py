"""EngineArgs: what a user can say about an engine, and its resolution into an EngineConfig.

Names, order and meaning are vLLM's where it has the field. The one place where defaults are chosen,
config.json is read and arguments are held against each other; nothing here starts or loads anything.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, get_args

import msgspec

from ...ipc.errors import ConfigError, describe_install, did_you_mean, make_printable
from ...ipc.files.file_identity import note_model
from ...ipc.spec.config import (
    ATTENTION_BACKENDS,
    CacheConfig,
    Dtype,
    EngineConfig,
    ExecutorBackend,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from ...ipc.spec.kv_groups import assign_kv_groups
from ...ipc.spec.model_spec import DTYPE_SIZE_BYTES, Convert, ModelImpl, Runner
from ...ipc.spec.options import Option, read_options
from ...ipc.spec.weight_format import CHECKPOINT_METHODS, Quantization
from ..models.model_files import POCKET
from ..text.chosen_template import read_chosen_template
from .off_values import DropsOffValues, drop_off_values

if TYPE_CHECKING:
    import argparse

    from ..models.checkpoint import Checkpoint

SHARED_MAX_QUEUED_BYTES = "1GiB"  # of engines that many clients share; a private one has no bound
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_Part = TypeVar("_Part", bound=msgspec.Struct)
_Container = TypeVar("_Container")  # of options: a parser or a group of one
_Args = TypeVar("_Args")
_DTYPE_ALIASES: dict[str, Dtype] = {"half": "float16", "float": "float32"}
DTYPES = ("auto", *get_args(Dtype), *_DTYPE_ALIASES)

_MAX_AUTO_STATE_BYTES = 2 << 30
_UNIT_BYTES = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
# Twenty digits hold every size and keep the product far from what a float cannot hold.
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size_bytes(name: str, value: int | str | None) -> int | None:
    """Bytes of a size such as 4096, '2GiB', '1.5GB' or '512M' (GB is 1000**3, G and GiB are 1024**3)."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNIT_BYTES.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(name, value, "bytes, or a number with a unit such as 512MiB or 2GiB")
    number = match.group(1)
    return int(float(number) * unit) if "." in number else int(number) * unit


def _format_size(size_bytes: int | None) -> str | None:
    """In the largest unit of which it is a whole number."""
    if size_bytes is None:
        return None
    power = next(power for power in (4, 3, 2, 1, 0) if size_bytes % 1024**power == 0)
    return f"{size_bytes // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _arg(
    group: str, default: Any, help_text: str, choices: tuple[str, ...] | None = None, alias: str = ""
) -> Any:
    metadata = {"group": group, "help": help_text, "choices": choices, "alias": alias}
    return field(default=default, metadata=metadata)


_model, _parallel, _scheduler, _process = (
    partial(_arg, group) for group in ("model", "parallel", "scheduler", "process")
)
# The config's parts, and the groups of their options in the order in which these are shown.
_GROUPS: dict[type[msgspec.Struct], str] = {
    ModelConfig: "model",
    ParallelConfig: "parallel",
    CacheConfig: "cache",
    SchedulerConfig: "scheduler",
    EngineConfig: "process",
    RecoveryConfig: "process",
}
# By their names; what users do not set is not among them.
_OPTIONS = {
    option.name: (option, option.get("group", group))
    for part, group in _GROUPS.items()
    for option in read_options(part)
    if option.text is not None
}


def _takes_options(cls: type[_Args]) -> type[_Args]:
    """Add to the arguments of a class, which is to be a dataclass, those that the config declares."""
    for name, (option, group) in _OPTIONS.items():
        is_size = option.get("is_size")
        default = option.get("default", _format_size(option.default) if is_size else option.default)
        choices = option.choices if option.type is str else None
        item = _arg(group, default, option.text or "", choices, option.get("alias", ""))
        kind = "int | str" if is_size else option.type.__name__
        cls.__annotations__[name] = f"{kind} | None" if item.default is None else kind
        setattr(cls, name, item)
    return cls


@dataclass
@_takes_options
class EngineArgs(metaclass=DropsOffValues):
    """Arguments of an engine; None means that Quire chooses.

    Here stand those that the frontend resolves; those that a config takes as they are stand in its fields
    (ipc/spec/config.py). An unknown name raises ConfigError, at construction too; vLLM's arguments for what
    Quire does not have are taken at the value that leaves it off (off_values.py). `model` and `tokenizer` may
    be given as a path object; they are kept as text.
    """

    model: str = _model(
        POCKET, "a folder, .gguf file, hub name or s3:// address; or Quire's 'pocket', 'pocket-encoder'"
    )
    served_model_name: str | Sequence[str] | None = _model(
        None, "the name shown to clients; more of them are taken in requests; default: the model's"
    )
    tokenizer: str | None = _model(None, "a folder, hub name or address; default: the model's own")
    skip_tokenizer_init: bool = _model(
        False, "run without a tokenizer: token ids in, token ids out (detokenize=False)"
    )
    trust_remote_code: bool = _model(False, "must stay off: Quire never runs code from a checkpoint")
    runner: str = _model("auto", "generate text or pool vectors; auto: as the model says", get_args(Runner))
    convert: str = _model(
        "auto", "the head of a model that has no pooling of its own; auto: embed", get_args(Convert)
    )
    model_impl: str = _model(
        "auto",
        "whose layers compute a model: quire's (vllm: the same), transformers', or its where Quire has none",
        get_args(ModelImpl),
    )
    pooler_config: Mapping[str, Any] | str | None = _model(
        None, 'how vectors are pooled, such as {"pooling_type": "MEAN"}; default: as the model says'
    )
    hf_overrides: Mapping[str, Any] | str | None = _model(
        None, 'values in the place of config.json\'s, such as {"is_matryoshka": true}'
    )
    dtype: str = _model("auto", "number format; auto: the checkpoint's", DTYPES)
    quantization: str | None = _model(
        None,
        "make a plain checkpoint's weights narrower while they are read; or a quantized one's own method",
        tuple(dict.fromkeys((*get_args(Quantization), *CHECKPOINT_METHODS))),  # fp8 is of both
    )
    seed: int | None = _model(
        None,
        "of an LLM: makes requests without a seed repeatable; also of dummy weights; default: 0 for these",
    )
    revision: str | None = _model(None, "branch, tag or commit of a hub model")
    tokenizer_revision: str | None = _model(
        None, "the same of the tokenizer; default: the revision, of a tokenizer that is the model's own"
    )
    download_dir: str | None = _model(
        None, "the folder of what is downloaded; default: the hub's (HF_HOME), of addresses ~/.cache/quire"
    )
    attention_backend: str | None = _model(
        None,
        "attention on a GPU, of what covers the model; FLASHINFER if it is installed; default: TRITON_ATTN",
        ("auto", *ATTENTION_BACKENDS),
    )
    logits_processors: Sequence[Any] | None = _model(
        None, "a class that edits logits (quire.LogitsProcessor), whose code is run; repeatable"
    )
    chat_template: str | None = _model(
        None, "a file, or the text, of a Jinja template in place of the model's own"
    )
    distributed_executor_backend: str | None = _parallel(
        None,
        "mp: a process per device (default); uni: one process; ray: on nodes of a Ray cluster",
        get_args(ExecutorBackend),
    )
    async_scheduling: bool | None = _scheduler(
        None, "schedule a step while the one before it runs; default on"
    )
    log_level: str = _process("INFO", "what the engine's processes log to standard error", LOG_LEVELS)

    if TYPE_CHECKING:  # of the declared ones

        def __init__(self, model: str = POCKET, **arguments: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *_args: Any, **kwargs: Any) -> Self:
        """Refuse an unknown name as every other user error is refused, before the dataclass' TypeError."""
        _check_names(kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "download_dir"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                setattr(self, name, os.fspath(cast(os.PathLike[str], value)))

    def create_engine_config(self) -> EngineConfig:
        """Find the model, check its files and every argument, and fix all decisions that need no device.

        Raises ConfigError or ModelError (both ValueErrors) with the field, the value and what is allowed.
        """
        from .logits_processor_names import find_module_files, find_module_folders, name_logits_processors

        self._check_arguments()
        self._check_parsers()
        processors = name_logits_processors(self.logits_processors)
        folders = find_module_folders(processors)
        model = self._create_model_config(find_module_files(processors, folders))
        scheduler, cache = self._create_scheduler_config(model), self._make(CacheConfig)
        sizes = cache.block_size, model.max_model_len, cache.kv_cache_dtype
        model = msgspec.structs.replace(model, spec=assign_kv_groups(model.spec, *sizes))
        return self._make(
            EngineConfig,
            model=model,
            cache=cache,
            scheduler=scheduler,
            parallel=self._make(ParallelConfig, executor_backend=self.distributed_executor_backend or "mp"),
            recovery=self._make(RecoveryConfig),
            log_level=self.log_level.upper(),
            logits_processors=processors,
            logits_processor_folders=folders,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from keyword arguments; unknown names raise ConfigError with the nearest known one."""
        return cls(**values)

    @staticmethod
    def add_cli_args(parser: _Container) -> _Container:
        """Add one option a field (`--max-model-len`), in groups; returns the parser, or the group, given."""
        import argparse

        for name in dict.fromkeys(_GROUPS.values()):
            group: Any = parser
            if isinstance(parser, argparse.ArgumentParser):
                group = parser.add_argument_group(f"{name} options")
            for item in fields(EngineArgs):
                if item.metadata["group"] == name:
                    words = item.metadata
                    kind, choices, alias = str(item.type), words["choices"], words["alias"]
                    add_option(group, item.name, kind, item.default, words["help"], choices, alias)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """Build from a namespace of `add_cli_args`; names that are not engine arguments are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in vars(namespace).items() if name in known})

    def _check_arguments(self) -> None:
        if self.distributed_executor_backend == "ray" and importlib.util.find_spec("ray") is None:
            raise ConfigError("distributed_executor_backend", "ray", f"only with: {describe_install('ray')}")
        if self.trust_remote_code:
            others = "most models that come with code are read without it, by a family of Quire's or by"
            others += " transformers' own classes: leave it out, `quire doctor MODEL` says what reads a model"
            raise ConfigError(
                "trust_remote_code", True, f"False: Quire runs no code from a checkpoint; {others}"
            )
        for option, _ in _OPTIONS.values():
            if option.get("default", option) is not None:  # else it is resolved first
                option.check(self._read(option))
        for item in fields(self):
            value, allowed = getattr(self, item.name), item.metadata["choices"]
            if item.name in _OPTIONS:
                continue
            if item.name in ("log_level", "attention_backend") and isinstance(value, str) and value != "auto":
                value = value.upper()
            if allowed and value is not None and value not in allowed:
                raise ConfigError(item.name, value, f"one of {', '.join(allowed)}")
            if item.type == "bool" and not isinstance(value, bool):
                raise ConfigError(item.name, value, "True or False")
            if item.type == "bool | None" and value is not None and not isinstance(value, bool):
                raise ConfigError(item.name, value, "True, False or None")
        for name in ("model", "tokenizer", "chat_template", "revision", "tokenizer_revision", "download_dir"):
            value = getattr(self, name)
            if (name == "model" or value is not None) and not (isinstance(value, str) and value):
                raise ConfigError(name, value, "a text that is not empty")
        self._list_names()

    def _list_names(self) -> list[str]:
        """What requests may call the model, the first what it is called; [] where nothing was given."""
        value = self.served_model_name
        names = [value] if isinstance(value, str) else list(value or ())
        if not all(isinstance(name, str) and name and name.isprintable() for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("served_model_name", value, "texts of printable characters that are not empty")
        return list(dict.fromkeys(names))

    def _check_parsers(self) -> None:
        if self.tool_call_parser is not None or self.reasoning_parser is not None:
            from ..formats.known_formats import check_parsers

            check_parsers(self.tool_call_parser, self.reasoning_parser)

    def _create_model_config(self, modules: list[str]) -> ModelConfig:
        """`modules`: files of the operator's code, which are noted with the model's."""
        from ..models.checkpoint import open_checkpoint  # with the readers of all that a model can be

        load_weights = self.load_format != "dummy"
        named_tokenizer = self.tokenizer or (self.model if self.tokenizer_revision else None)
        checkpoint = open_checkpoint(
            self.model,
            self.revision,
            runner=cast(Runner, self.runner),
            convert=cast(Convert, self.convert),
            model_impl=cast(ModelImpl, self.model_impl),
            pooler=_read_object("pooler_config", self.pooler_config),
            overrides=_read_object("hf_overrides", self.hf_overrides),
            load_weights=load_weights,
            load_vocabulary=named_tokenizer is None and not self.skip_tokenizer_init,
            download_dir=self.download_dir,
        )
        root = str(checkpoint.root)
        tokenizer = ""
        if not self.skip_tokenizer_init:
            where = self.tokenizer_revision, self.download_dir
            tokenizer = checkpoint.find_tokenizer(named_tokenizer, *where)
        files = (*checkpoint.weight_files, *(checkpoint.head_files if load_weights else ()))
        names = self._list_names() or [make_printable(self.model)]
        if self.generation_config == "auto":
            checkpoint.check_sampling()
        named = _DTYPE_ALIASES.get(self.dtype, cast(Dtype, self.dtype))
        seed = 0 if self.seed is None else self.seed
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("seed", seed, "an integer from 0 to 2**63 - 1, or None")
        template = None if self.chat_template is None else read_chosen_template(self.chat_template)
        return self._make(
            ModelConfig,
            model=root,
            served_model_name=names[0],
            served_model_aliases=tuple(names[1:]),
            chat_template=template,
            tokenizer=tokenizer,
            spec=checkpoint.spec,
            dtype=checkpoint.dtype if self.dtype == "auto" else named,
            attention_backend=ATTENTION_BACKENDS.get((self.attention_backend or "auto").upper(), "auto"),
            quantization=checkpoint.resolve_quantization(self.quantization),
            max_model_len=checkpoint.compute_max_model_len(self.max_model_len),
            weight_files=checkpoint.weight_files,
            noted=note_model(root, tokenizer, files, modules),
            gguf_tensors=checkpoint.folder.gguf_tensors,
            seed=seed,
            eos_token_ids=_find_ends(checkpoint, tokenizer, template),
        )

    def _create_scheduler_config(self, model: ModelConfig) -> SchedulerConfig:
        from .gpu_cards import choose_step_defaults  # with ctypes

        defaults = choose_step_defaults(self.device)
        budget = self.max_num_batched_tokens
        if budget is None:  # an unsplit prompt must fit into one step
            is_split = self.enable_chunked_prefill and model.spec.is_causal
            whole_prompt = 0 if is_split else model.max_model_len
            budget = max(defaults.max_num_batched_tokens, whole_prompt)
        return self._make(
            SchedulerConfig,
            max_num_batched_tokens=budget,
            max_num_seqs=self._find_rows(model, defaults.max_num_seqs),
            run_ahead=1 if self.async_scheduling is False else 2,
        )

    def _find_rows(self, model: ModelConfig, most: int) -> int:
        """max_num_seqs. By default at most as many as there are slots for recurrent states, or so many that
        these take 2 GiB.
        """
        size = model.spec.state_size * DTYPE_SIZE_BYTES["float32"]
        if self.max_num_seqs is not None or not size:
            return most if self.max_num_seqs is None else self.max_num_seqs
        return max(1, min(most, self.num_state_slots or _MAX_AUTO_STATE_BYTES // size))

    def _make(self, part: type[_Part], **resolved: Any) -> _Part:
        """A part of the config: what was resolved, and the other arguments as they were given."""
        values = {each.field: self._read(each) for each in read_options(part) if each.name in _OPTIONS}
        return part(**{**values, **resolved})

    def _read(self, option: Option) -> Any:
        """What was given, as the config has it."""
        value = getattr(self, option.name)
        if option.get("is_size"):
            return parse_size_bytes(option.name, value)
        return 0 if value is None and option.get("zero") is not None else value


def _read_object(name: str, value: object) -> dict[str, Any]:
    """An object given as one or as JSON, {} for None; ConfigError for anything else."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(name, value, f"a JSON object ({error})") from None
    if value is not None and not isinstance(value, dict):
        raise ConfigError(name, value, "a JSON object, a dict or None")
    return cast(dict[str, Any], value or {})


def _check_names(values: dict[str, Any]) -> None:
    known = EngineArgs.__dataclass_fields__
    for name, value in drop_off_values(values).items():
        if name not in known:
            raise ConfigError(name, value, f"no such engine argument{did_you_mean(name, known)}")


def add_option(
    group: Any,
    name: str,
    kind: str,
    default: Any,
    text: str,
    choices: Sequence[Any] | None = None,
    alias: str = "",
) -> None:
    """Add an option to a parser or a group. kind: its annotation; text: '' of one that is not shown."""
    import argparse

    options: dict[str, Any] = {"dest": name, "default": default, "help": text or argparse.SUPPRESS}
    if kind.startswith("bool"):
        options["action"] = argparse.BooleanOptionalAction
    elif kind.startswith("str | Sequence"):
        options |= {"action": "extend", "nargs": "+", "metavar": name.rsplit("_", 1)[-1].upper()}
    elif kind.startswith("Sequence"):
        options |= {"action": "append", "metavar": "MODULE:CLASS"}  # one each: a prompt or model may follow
    elif choices:
        options["choices"] = choices
    elif kind.startswith(("int", "float")) and "str" not in kind:
        options["type"] = float if kind.startswith("float") else int
        options["metavar"] = "N"
    else:
        options["metavar"] = name.rsplit("_", 1)[-1].upper()
    group.add_argument(f"--{name.replace('_', '-')}", *([alias] if alias else []), **options)


def _find_ends(checkpoint: Checkpoint, tokenizer: str, chat_template: str | None) -> tuple[int, ...]:
    """What ends an answer: what the model's files and its tokenizer name; if they name nothing, the end of a
    turn in the chat template.
    """
    ids = checkpoint.eos_token_ids
    if not tokenizer or not checkpoint.spec.has_logits:
        return ids
    from ..text.end_tokens import find_turn_end, read_eos_token_id

    end = read_eos_token_id(tokenizer)
    if end is None and not ids:
        end = find_turn_end(tokenizer, chat_template)
    if end is None or end >= checkpoint.spec.vocab_size or end in ids:
        return ids
    return (*ids, end)
