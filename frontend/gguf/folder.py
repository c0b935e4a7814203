"""Puts what a GGUF file's header says into a model folder of the usual files, in which no weights lie.

The folder is one of a cache, named by the header's content. The cache is kept small: those opened last stay,
and those that an engine serves. So what reads config.json,
tokenizer.json and the rest (families, tokenizers, grammars, clients of a daemon) knows nothing of GGUF.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.errors import ModelError
from ...ipc.gguf_tensor import GgufTensor, find_main_type
from ...ipc.processes.folder_lock import lock_to_remove
from .config import Config, read_config, read_generation_config
from .header import MAX_HEADER_BYTES, GgufHeader, read_header
from .tensors import name_tensors
from .vocabulary import TOKENS, Vocabulary, make_tokenizer, make_tokenizer_config

_VERSION = b"1"  # of what is written; another one makes other folders
_CHUNK_BYTES = 1 << 20


class GgufModel(msgspec.Struct, frozen=True):
    """The folder of a GGUF model, and where its weights lie."""

    folder: Path
    files: tuple[Path, ...]
    tensors: tuple[GgufTensor, ...]
    stored_dtype: str

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def cache_folder() -> Path:
    """Where these folders are kept: $XDG_CACHE_HOME/quire/gguf or ~/.cache/quire/gguf."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire" / "gguf"


def open_gguf(files: Sequence[Path], with_tokenizer: bool = True) -> GgufModel:
    """Read the headers and find or make the folder. `files` are the parts of one model in order.

    Raises ModelError: a header that is corrupt, a model or vocabulary that is not read here, and a cache that
    cannot be written.
    """
    headers = _read_headers(files)
    first = headers[0]
    _check_parts(headers)
    config = read_config(first if len(headers) == 1 else _join(headers))
    tensors = name_tensors(headers, config)
    target = cache_folder() / f"{_shorten(files[0].stem)}-{_hash(headers, config)}"
    has_tokenizer = with_tokenizer and TOKENS in first.metadata
    if (target / ("tokenizer.json" if has_tokenizer else "config.json")).is_file():
        note_used(target)
    else:
        contents = {"config.json": config}
        if has_tokenizer:
            vocabulary = Vocabulary(first)
            contents["tokenizer.json"] = make_tokenizer(vocabulary)
            contents["tokenizer_config.json"] = make_tokenizer_config(vocabulary)
            contents["generation_config.json"] = read_generation_config(first)
        _write(target, contents)
        remove_old(target.parent)
    return GgufModel(target, tuple(files), tensors, _find_dtype(tensors))


def _read_headers(files: Sequence[Path]) -> list[GgufHeader]:
    """Of all parts, which together take no more than one file's may; later ones hold tables of tensors."""
    headers: list[GgufHeader] = []
    for file in files:
        headers.append(read_header(file))
        size_bytes = sum(header.size_bytes for header in headers)
        if size_bytes > MAX_HEADER_BYTES:
            allowed = f"headers of at most {MAX_HEADER_BYTES} bytes in all parts"
            raise ModelError(file.name, f"{size_bytes} bytes", allowed)
    return headers


def _join(headers: Sequence[GgufHeader]) -> GgufHeader:
    """The first part's metadata with the tensors of all."""
    first = headers[0]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    return GgufHeader(first.file, first.metadata, tensors, first.size_bytes)


def _check_parts(headers: Sequence[GgufHeader]) -> None:
    first, count = headers[0], sum(len(header.tensors) for header in headers)
    declared = first.metadata.get("split.count", 1)
    if declared not in (0, len(headers)):
        field = f"{first.file.name} split.count"
        raise ModelError(field, declared, f"{len(headers)}: parts are named -00001-of-{len(headers):05}.gguf")
    declared = first.metadata.get("split.tensors.count", count)
    if declared != count:
        raise ModelError(f"{first.file.name} split.tensors.count", declared, f"{count}, which the parts hold")


def _find_dtype(tensors: Sequence[GgufTensor]) -> str:
    """What is quantized is served in bfloat16."""
    return {"F32": "float32", "F16": "float16"}.get(find_main_type(tensors), "bfloat16")


def _hash(headers: Sequence[GgufHeader], config: Config) -> str:
    """Of the headers, and of what a table in the data (rope_freqs) has put into `config`."""
    digest = hashlib.sha256(_VERSION)
    digest.update(msgspec.json.encode(config))
    for header in headers:
        with header.file.open("rb") as stream:
            left = header.size_bytes
            while left > 0 and (chunk := stream.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()[:16]


def _shorten(stem: str) -> str:
    return re.sub(r"[^\w.-]", "_", stem)[:48].lstrip(".") or "model"


def _write(target: Path, contents: dict[str, dict[str, Any]]) -> None:
    """All at once: another process sees none of it or the whole."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = Path(tempfile.mkdtemp(dir=target.parent, prefix=SCRATCH_PREFIX))
        try:
            for name, content in contents.items():
                (made / name).write_bytes(msgspec.json.encode(content))
            _put(made, target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        allowed = f"a folder that can be written, for a GGUF file's tokenizer ({error.strerror})"
        raise ModelError("XDG_CACHE_HOME", str(target.parent), allowed) from error


def _put(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:  # there is one
        if all((target / file.name).is_file() for file in made.iterdir()):
            return  # of a process that has been quicker, and reads it
        shutil.rmtree(target, ignore_errors=True)  # one without a tokenizer, or half removed
        made.rename(target)


SCRATCH_PREFIX = "new-"  # of a folder that is being written or removed
NUM_KEPT = 64
MAX_BYTES = 512 << 20  # a large vocabulary takes 10 to 30 MB
_MAX_SCRATCH_AGE_S = 3600.0  # an older one is of a process that was killed


def note_used(folder: Path) -> None:
    """Count as opened at this moment."""
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(folder)


def remove_old(cache: Path) -> None:
    """Remove what is too much, the longest unused first, but never the one used last."""
    ages_s: dict[Path, float] = {}
    with contextlib.suppress(OSError):  # another process removes them
        for path in cache.iterdir():
            ages_s[path] = time.time() - path.lstat().st_mtime
    total_bytes = num_kept = 0
    for path in sorted(ages_s, key=lambda path: ages_s[path]):
        if path.name.startswith(SCRATCH_PREFIX):
            if ages_s[path] > _MAX_SCRATCH_AGE_S:
                shutil.rmtree(path, ignore_errors=True)
            continue
        total_bytes += _count_bytes(path)
        if num_kept and (num_kept >= NUM_KEPT or total_bytes > MAX_BYTES):
            _remove(path)
        num_kept += 1


def _remove(folder: Path) -> None:
    """Unless a process serves it."""
    with lock_to_remove(folder) as is_free, contextlib.suppress(OSError):
        if is_free:
            # Gone at once, or not at all.
            left = folder.rename(folder.with_name(SCRATCH_PREFIX + folder.name))
            shutil.rmtree(left, ignore_errors=True)


def _count_bytes(folder: Path) -> int:
    try:
        return sum(file.lstat().st_size for file in folder.iterdir())
    except OSError:  # another process removes it
        return 0
