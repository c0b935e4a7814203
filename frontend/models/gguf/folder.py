"""Puts what a GGUF file's header says into a model folder of the usual files, in which no weights lie.

The folder is one of a PrivateCache, named by the header's content, and is made again when it is not as it was
written. The cache is kept small: those opened last stay, and those that an engine serves. So what reads
config.json, tokenizer.json and the rest (families, tokenizers, grammars, clients of a daemon) knows nothing
of GGUF.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ....ipc.daemon.run_dir import find_base
from ....ipc.errors import ConfigError, ModelError
from ....ipc.files.private_cache import CacheUnusableError, PrivateCache, find_cache_home
from ....ipc.spec.gguf_tensor import GgufTensor, find_main_type
from .architectures import Config
from .config import read_config, read_generation_config
from .header import MAX_HEADER_BYTES, GgufHeader, read_header
from .tensors import name_tensors
from .vocabulary import TOKENS, Vocabulary, make_tokenizer, make_tokenizer_config

_log = logging.getLogger(__name__)

NUM_KEPT = 64
MAX_BYTES = 512 << 20  # a large vocabulary takes 10 to 30 MB
_VERSION = b"2"  # of what is written; another one makes other folders
_CHUNK_BYTES = 1 << 20


class GgufModel(msgspec.Struct, frozen=True):
    """The folder of a GGUF model, and where its weights lie."""

    folder: Path
    files: tuple[Path, ...]
    tensors: tuple[GgufTensor, ...]
    stored_dtype: str

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


def cache_folder() -> Path:
    """Where these folders are kept: $XDG_CACHE_HOME/quire/gguf or ~/.cache/quire/gguf."""
    return find_cache_home() / "gguf"


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
    name = f"{_shorten(files[0].stem)}-{_hash(headers, config)}"
    has_tokenizer = with_tokenizer and TOKENS in first.metadata
    needed = "tokenizer.json" if has_tokenizer else "config.json"
    reason = ""
    for cache in _open_caches():
        folder = cache.find_folder(name)
        if folder is not None and (folder / needed).is_file():
            cache.note_used(name)
        else:
            try:
                folder = cache.put_folder(name, _make_contents(config, first, has_tokenizer))
            except OSError as error:
                reason = f" ({cache.folder}: {error.strerror})"
                continue
            cache.remove_old(NUM_KEPT, MAX_BYTES)
        return GgufModel(folder, tuple(files), tensors, _find_dtype(tensors))
    allowed = f"a folder that can be written, for a GGUF file's tokenizer{reason}"
    raise ModelError("XDG_CACHE_HOME", str(cache_folder()), allowed)


def _open_caches() -> Iterator[PrivateCache]:
    """The cache, and one beside this user's run directories: a folder that is served must lie somewhere.

    None where neither can be used.
    """
    try:
        yield PrivateCache(cache_folder())
    except CacheUnusableError as error:
        _log.warning("a GGUF file's tokenizer is not kept for long: %s", error)
    try:
        yield PrivateCache(find_base() / "cache.gguf")  # no daemon has such a name
    except (CacheUnusableError, ConfigError) as error:
        _log.debug("%s", error)


def _make_contents(config: Config, first: GgufHeader, has_tokenizer: bool) -> dict[str, bytes]:
    """The folder's files. Raises ModelError."""
    contents: dict[str, object] = {"config.json": config}
    if has_tokenizer:
        vocabulary = Vocabulary(first)
        contents["tokenizer.json"] = make_tokenizer(vocabulary)
        contents["tokenizer_config.json"] = make_tokenizer_config(vocabulary)
        contents["generation_config.json"] = read_generation_config(first)
    return {file: msgspec.json.encode(content) for file, content in contents.items()}


def _read_headers(files: Sequence[Path]) -> list[GgufHeader]:
    """The headers of all parts, bounded together as one file's; later parts hold tables of tensors only."""
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
    """A hash of the headers, and of what a table in the data (rope_freqs) has put into `config`."""
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
