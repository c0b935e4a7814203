"""Checkpoint: a model's files, found and checked, and what an engine is told of them. Asks no device.

Who attaches to a daemon loads none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import ConfigError, ModelError
from ...ipc.spec.model_spec import Convert, Dtype, ModelImpl, ModelSpec, Runner, rename_stored
from ...ipc.spec.weight_format import Quantization
from .families import find_family, read_model_spec
from .families.wrapped import STORED_PREFIXES, find_wrapper, unwrap, with_stored_names
from .generic import read_generic_spec
from .gguf.files import find_gguf_files
from .gguf.tensors import as_converted, make_formats
from .hf_config import compute_max_model_len, read_default_sampling, read_dtype, read_eos_token_ids
from .model_folder import ModelFolder, find_model_folder, inspect_gguf, inspect_model_folder
from .pooling_head import HeadChoice, choose_heads
from .quantization import read_weight_formats, resolve_quantization
from .sentence_transformers import find_transformer_folder, read_text_encoding
from .vocabulary_files import find_tokenizer_folder
from .weight_shapes import check_shapes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """root: the model's folder. folder: the one within it that has config.json and weights."""

    root: Path
    folder: ModelFolder
    spec: ModelSpec

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Names within the root, or whole paths of files elsewhere."""
        return tuple(
            str(file.relative_to(self.root) if file.is_relative_to(self.root) else file)
            for file in self.folder.weight_files
        )

    @property
    def head_files(self) -> tuple[str, ...]:
        """Of the weights of projections that have files of their own, as sentence-transformers' have."""
        projections = () if self.spec.pooling is None else self.spec.pooling.projections
        return tuple(sorted({projection.file for projection in projections if projection.file is not None}))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids that the files of a model that generates name beside its tokenizer's."""
        if not self.spec.has_logits:
            return ()
        return read_eos_token_ids(self.folder.config, self.folder.generation_config, self.spec.vocab_size)

    @property
    def dtype(self) -> Dtype:
        """The checkpoint's own format, float32 and float16 included: vLLM would halve float32, which changes
        what the model says, and keeps float16 on a CPU too.
        """
        return read_dtype(self.folder.config, self.folder.stored_dtype)

    def check_sampling(self) -> None:
        """Refuse a generation_config.json now rather than at every request. Raises ModelError."""
        read_default_sampling(self.folder.generation_config)

    def compute_max_model_len(self, wanted: int | None) -> int:
        """Of a pooling model the length that it was made for, where its files say one. Raises ConfigError."""
        usual_len = None if self.spec.has_logits else read_text_encoding(self.root).max_seq_length
        return compute_max_model_len(self.spec, wanted, usual_len)

    def resolve_quantization(self, name: str | None) -> Quantization | None:
        """Weights that are made narrower while they are read. Raises ConfigError."""
        return resolve_quantization(name, self.folder.config, bool(self.folder.gguf_tensors))

    def find_tokenizer(
        self, tokenizer: str | None, revision: str | None = None, download_dir: str | None = None
    ) -> str:
        """The folder of the tokenizer of that name, or of the model's own. Raises ModelError."""
        folder = self.folder.path
        if tokenizer is not None:
            folder = find_model_folder(tokenizer, revision, "tokenizer", download_dir)
        folder = find_tokenizer_folder(folder)
        if not (folder / "tokenizer.json").is_file():
            files = "a tokenizer.json, tokenizer.model or tekken.json"
            raise ModelError("tokenizer", str(folder), f"a folder with {files}, or skip_tokenizer_init=True")
        return str(folder)


def open_checkpoint(
    model: str,
    revision: str | None,
    *,
    runner: Runner,
    convert: Convert,
    model_impl: ModelImpl,
    pooler: Mapping[str, Any],
    overrides: Mapping[str, Any],
    load_weights: bool,
    load_vocabulary: bool,
    download_dir: str | None = None,
) -> Checkpoint:
    """Find a model and check its files. Raises ModelError, ConfigError.

    runner, convert, model_impl, pooler: as EngineArgs has them. overrides: in the place of config.json's.
    download_dir: of what is downloaded, as EngineArgs has it.
    With load_weights False no weight files are needed, with load_vocabulary False no GGUF file's vocabulary.
    """
    if files := find_gguf_files(model, revision, download_dir=download_dir):
        folder = inspect_gguf(files, load_vocabulary)
        root = folder.path
    else:
        root = find_model_folder(model, revision, download_dir=download_dir)
        folder = inspect_model_folder(find_transformer_folder(root), load_weights)
    is_wrapped = find_wrapper(folder.config) is not None and model_impl != "transformers"
    if is_wrapped:
        folder = _unwrap(folder)
    config = {**folder.config, **overrides}
    choice = HeadChoice(runner, convert, pooler)
    is_generic = model_impl == "transformers" or (model_impl == "auto" and find_family(config) is None)
    spec = read_generic_spec(config) if is_generic else read_model_spec(config)
    spec = choose_heads(spec, choice, root, config, load_weights)
    if folder.gguf_tensors and is_generic:
        raise ConfigError("model_impl", model_impl, "auto or quire for a GGUF file")
    if folder.gguf_tensors:
        spec = as_converted(spec)
        formats = make_formats(folder.gguf_tensors, spec)
    else:
        formats = read_weight_formats(config, spec, folder.float_tensors)
    if is_wrapped:
        spec = with_stored_names(spec)
    spec = msgspec.structs.replace(spec, weight_formats=formats)
    if folder.shapes and not is_generic:
        check_shapes(spec, folder.shapes, folder.path)
    return Checkpoint(root, folder, spec)


def _unwrap(folder: ModelFolder) -> ModelFolder:
    """The folder as one of the text model in it."""
    config = unwrap(folder.config)
    if folder.has_head and folder.config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = False  # the class ties them by default, and then not
    floats = frozenset(rename_stored(name, STORED_PREFIXES) for name in folder.float_tensors)
    return replace(folder, config=config, float_tensors=floats)
