"""Reads single files of a model folder, which may be anybody's: regular files only, and only so many bytes.

A FIFO or a device in a file's place would block the reader for ever or never end. Knows no file's meaning.
Fetches folders from the hub, and has those at addresses fetched (remote_files.py).
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from ...ipc.decoding import decode_json
from ...ipc.errors import ModelError

POCKET, POCKET_ENCODER = "pocket", "pocket-encoder"  # the models in the package
# Configurations, whose objects take up to 30 times their text; the largest that is known has 2 MB.
MAX_JSON_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20  # the index of 91,000 tensors has 9 MB
MAX_TOKENIZER_BYTES = 256 << 20  # the largest that is known has 35 MB
MAX_TEMPLATE_BYTES = 1 << 20

_T = TypeVar("_T")


def open_regular(file: Path) -> BinaryIO:
    """Open for reading, without waiting for a FIFO's writer.

    Raises FileNotFoundError; ModelError for what cannot be opened, is no regular file or a link to none.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if file.is_symlink():  # as one that lost what it leads to, of a cache; not a file that may be missing
            raise ModelError(file.name, str(file), "a link to a file that is there") from None
        raise
    except OSError as error:
        raise ModelError(file.name, str(file), f"a file that can be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelError(file.name, str(file), "a regular file, not a folder, FIFO or device")
    return os.fdopen(descriptor, "rb")


def read_file(file: Path, max_bytes: int) -> bytes:
    """A file's content. Raises as `open_regular`, and ModelError for more than `max_bytes`."""
    with open_regular(file) as stream:
        _check_size(file, stream, max_bytes)
        try:
            return stream.read(max_bytes)
        except OSError as error:
            raise ModelError(file.name, str(file), f"a file that can be read ({error.strerror})") from error


def check_file(file: Path, max_bytes: int) -> None:
    """Check a file that a library reads. Raises as `read_file`."""
    with open_regular(file) as stream:
        _check_size(file, stream, max_bytes)


def _check_size(file: Path, stream: BinaryIO, max_bytes: int) -> None:
    size = os.fstat(stream.fileno()).st_size
    if size > max_bytes:
        raise ModelError(file.name, str(file), f"at most {max_bytes} bytes; it has {size}")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file's object, {} if the file does not exist; ModelError if it is anything but an object.

    It may have Infinity and NaN, as Python writes them (Mamba's time_step_limit).
    """
    try:
        content = read_json_as(file, MAX_JSON_BYTES, cast(type[Any], Any))
    except FileNotFoundError:
        return {}
    except ModelError:
        text = read_file(file, MAX_JSON_BYTES)
        if b"Infinity" not in text and b"NaN" not in text:
            raise
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(file.name, str(file), f"readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(file.name, str(file), f"a JSON object, not a {type(content).__name__}")
    return cast(dict[str, Any], content)


def read_json_as(file: Path, max_bytes: int, type_: type[_T]) -> _T:
    """A JSON file as a msgspec type, which bounds what it takes in memory. Raises as `read_file`."""
    try:
        return decode_json(read_file(file, max_bytes), type_)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(file.name, str(file), f"readable JSON ({error})") from error


# Downloads of model folders from the Hugging Face hub, or what is left of them in its local cache.

# Second copies of the same weights, and a training's earlier ones.
_IGNORED_FILES = ["original/*", "consolidated*", "onnx/*", "checkpoint-*/*"]
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+")


def is_address(model: str) -> bool:
    """Whether a name is an address such as s3://bucket/model, which a local folder or hub model has not."""
    return _ADDRESS.fullmatch(model) is not None


def strip_file_scheme(model: str) -> str:
    """The path in file:///path, which is read where it is; other names as they are."""
    return model.removeprefix("file://")


def download(
    model: str,
    revision: str | None,
    field_name: str,
    patterns: Sequence[str],
    allowed: str,
    download_dir: str | None = None,
) -> Path:
    """The local folder of the files that match a pattern, of a hub model or at an address. Raises ModelError.

    `download_dir`: in place of the hub's own cache, and of Quire's.
    """
    cache = None if download_dir is None else make_download_dir(download_dir)
    if is_address(model):
        from .remote_files import fetch_folder

        check_no_revision(revision, field_name, model)
        return fetch_folder(model, field_name, patterns, _IGNORED_FILES, cache)
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=cache,
            allow_patterns=list(patterns),
            ignore_patterns=_IGNORED_FILES,
        )
    except RepositoryNotFoundError as error:
        raise ModelError(field_name, model, f"{allowed} (not on the hub)") from error
    except LocalEntryNotFoundError as error:
        reason = "not in the local cache, and the hub cannot be reached"
        raise ModelError(field_name, model, f"{allowed} ({reason})") from error
    except Exception as error:  # the hub client raises what its HTTP library does; to us it is all one
        reason = f"the hub answered: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise ModelError(field_name, model, f"{allowed} ({reason})") from error
    return Path(folder)


def check_no_revision(revision: str | None, field_name: str, model: str) -> None:
    """Raise ModelError for a revision beside anything but the hub's models: what is read would be another."""
    if revision is not None:
        name = "revision" if field_name == "model" else "tokenizer_revision"
        raise ModelError(name, revision, f"None: only the hub's models have revisions, not {model}")


def make_download_dir(download_dir: str) -> Path:
    """Make the folder where it is not there. Raises ModelError for one that cannot be written."""
    allowed = "a folder that can be written, or that can be made"
    try:
        folder = Path(download_dir).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError) as error:  # ~ of an unknown user, a null byte
        reason = getattr(error, "strerror", None) or error
        raise ModelError("download_dir", download_dir, f"{allowed} ({reason})") from error
    if not is_writable:
        raise ModelError("download_dir", download_dir, allowed)
    return folder
