"""The files of a model that frontends read, by content: a copy on another machine must equal the engine's.

Another tokenizer, chat template or default parameters would make wrong text without an error.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..errors import ModelError

_MODEL_PATTERNS = (
    "config.json",
    "generation_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]*_*/config.json",  # modules of sentence-transformers
)
_TOKENIZER_PATTERNS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
_SHOWN = 12  # characters of a hash


class ServedFiles(msgspec.Struct, frozen=True):
    """File name in its folder -> SHA-256 in hex. `tokenizer` is empty for an engine without one."""

    model: dict[str, str]
    tokenizer: dict[str, str]


def hash_served_files(model_folder: str, tokenizer_folder: str) -> ServedFiles:
    """Hash both folders' files; '' is an empty folder. Raises ModelError for a file that cannot be read."""
    return ServedFiles(
        _hash_folder(model_folder, _MODEL_PATTERNS), _hash_folder(tokenizer_folder, _TOKENIZER_PATTERNS)
    )


def check_copy(engine: ServedFiles, model_folder: str, tokenizer_folder: str) -> None:
    """Raise ModelError, with the start of both hashes, for the first file that is not the engine's."""
    ours = hash_served_files(model_folder, tokenizer_folder if engine.tokenizer else "")
    _compare("model", model_folder, ours.model, engine.model)
    _compare("tokenizer", tokenizer_folder, ours.tokenizer, engine.tokenizer)


def _compare(field: str, folder: str, ours: dict[str, str], engine: dict[str, str]) -> None:
    for name in sorted({*ours, *engine}):
        here, there = ours.get(name), engine.get(name)
        if here != there:
            allowed = f"a copy of the engine's; {name} is {_show(here)} here and {_show(there)} there"
            raise ModelError(field, folder, allowed)


def _show(digest: str | None) -> str:
    return "missing" if digest is None else f"sha256:{digest[:_SHOWN]}"


def _hash_folder(folder: str, patterns: tuple[str, ...]) -> dict[str, str]:
    return {name: _hash(Path(folder, name)) for name in _find(folder, patterns)}


def _find(folder: str, patterns: tuple[str, ...]) -> Iterator[str]:
    for pattern in patterns:
        for path in sorted(Path(folder).glob(pattern)) if folder else ():
            if not path.is_dir():
                yield str(path.relative_to(folder))


def find_model_files(folder: str) -> Iterator[str]:
    """The names of the model's files that frontends read."""
    return _find(folder, _MODEL_PATTERNS)


def find_tokenizer_files(folder: str) -> Iterator[str]:
    """The names of the tokenizer's and the chat templates' files; none in ''."""
    return _find(folder, _TOKENIZER_PATTERNS)


def _hash(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(path.name, str(path), "a regular file")
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(path.name, str(path), f"a file that can be read ({error.strerror})") from None
