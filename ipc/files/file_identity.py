"""Whether a file is still the one that an engine was started with. Every later reader asks, before and after.

A file is known by its stamp, which costs a system call. One that was written again with what it held, moved
or copied back has another stamp and the same content: then SHA-256 decides, as far as it is known what was
there before. That is found once a file, behind a start (`find_digests`), and kept by the stamp.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..errors import FilesChangedError, ModelError, shorten_name
from ..network.served_files import find_model_files, find_tokenizer_files
from .private_cache import CacheUnusableError, PrivateCache

_BLOB_NAME = re.compile(r"[0-9a-f]{64}")  # of a large file in the hub's cache: its SHA-256
_CACHE_NAME = "digests"
_MAX_DIGESTS = 4096
_SHOWN = 12  # characters of a hash
_REMEDY = "start the engine anew for what is there now (`quire daemon restart NAME`)"


class FileStamp(msgspec.Struct, array_like=True, frozen=True):
    """A file as it lies there. `ctime_ns`, unlike `mtime_ns`, cannot be put back to what it was."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    blob: str = ""  # its SHA-256, where the hub's cache says it by the file's name


Stamps = Mapping[str, FileStamp]  # by the file's name in its folder, or its whole path


class NotedFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's files as an engine's start has found them: what a worker reads, and what frontends read."""

    weights: dict[str, FileStamp] = {}
    model: dict[str, FileStamp] = {}
    tokenizer: dict[str, FileStamp] = {}
    processors: dict[str, FileStamp] = {}  # whole paths of the modules of an operator's logits processors


def stamp_file(path: Path) -> FileStamp:
    """Of a regular file, symbolic links followed. Raises OSError."""
    status = path.stat()
    name = os.path.basename(os.path.realpath(path))
    blob = name if _BLOB_NAME.fullmatch(name) else ""
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, blob)


def note_model(
    folder: str, tokenizer_folder: str, weight_files: Iterable[str], processors: Iterable[str] = ()
) -> NotedFiles:
    """All files of a model, as they are now. Raises ModelError for weights that are not there."""
    return NotedFiles(
        weights=note_files(folder, weight_files),
        model=note_files(folder, find_model_files(folder)),
        tokenizer=note_files(tokenizer_folder, find_tokenizer_files(tokenizer_folder)),
        processors=note_files("", processors),
    )


def check_served(noted: NotedFiles | None, folder: str, tokenizer_folder: str) -> None:
    """Raise FilesChangedError if what frontends read of a model has changed. None: nothing was noted."""
    if noted is not None:
        check_files(folder, noted.model, find_model_files(folder))
        check_files(tokenizer_folder, noted.tokenizer, find_tokenizer_files(tokenizer_folder))


def check_loaded(noted: NotedFiles | None, folder: str, tokenizer_folder: str) -> None:
    """The same of what a worker reads: the weights, and for grammars the tokenizer."""
    if noted is not None:
        check_files(folder, {**noted.weights, **noted.processors})
        check_tokenizer(noted, tokenizer_folder)


def check_tokenizer(noted: NotedFiles | None, tokenizer_folder: str) -> None:
    """The same of the one file that says which text a token is."""
    if noted is not None:
        check_files(tokenizer_folder, {k: v for k, v in noted.tokenizer.items() if k == "tokenizer.json"})


def note_files(folder: str, names: Iterable[str]) -> dict[str, FileStamp]:
    """The stamps of files of a folder. Raises ModelError for one that is not there."""
    try:
        return {name: stamp_file(Path(folder, name)) for name in names}
    except OSError as error:
        raise ModelError(
            "model", str(error.filename), f"a file that can be read ({error.strerror})"
        ) from None


def check_files(folder: str, noted: Stamps, present: Iterable[str] | None = None) -> None:
    """Raise FilesChangedError for the first that is not as it was noted.

    `present`: the files of this kind that there are now; a new one is refused, too.
    """
    for name, stamp in noted.items():
        change = find_change(Path(folder, name), stamp)
        if change:
            raise _make_changed_error(folder, name, change)
    for name in present or ():
        if name not in noted:
            raise _make_changed_error(folder, name, "the engine was started without this file")


def _make_changed_error(folder: str, name: str, change: str) -> FilesChangedError:
    path = Path(folder, name)
    return FilesChangedError(shorten_name(path.name), str(path), f"{change}; {_REMEDY}")


def find_change(path: Path, noted: FileStamp) -> str:
    """In what the file differs from the noted one, '' if it does not.

    Reads all of it if only its stamp differs: a second a GB.
    """
    begin = "it is not the file that the engine was started with"
    try:
        now = stamp_file(path)
        if now == noted:
            return ""
        if now.size != noted.size:
            return f"{begin}: it has {now.size} bytes, and had {noted.size}"
        before = find_digest(noted)
        if before is None:
            return f"{begin}: it was written again since, and what it held is not known"
        digest = compute_digest(path, now)
    except OSError as error:
        return f"{begin}: it cannot be read any more ({error.strerror})"
    if digest != before:
        return f"{begin}: its content is sha256:{digest[:_SHOWN]}, and was sha256:{before[:_SHOWN]}"
    return ""


def find_digest(stamp: FileStamp) -> str | None:
    """SHA-256 of the file that had this stamp, in hex; None if nobody has computed it."""
    if stamp.blob:
        return stamp.blob
    try:
        content = _open_cache().read(_name(stamp))
    except CacheUnusableError:
        return None
    return None if content is None else content.decode("ascii", "replace")


def compute_digest(path: Path, stamp: FileStamp) -> str:
    """Read all of a file that has this stamp, and have the next one find it. Raises OSError."""
    known = find_digest(msgspec.structs.replace(stamp, blob=""))
    if known is not None:
        return known
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file", str(path))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stamp_file(path) == stamp:  # else it was written meanwhile
        keep_digest(stamp, digest)
    return digest


def keep_digest(stamp: FileStamp, digest: str) -> None:
    """Have `find_digest` find it, unless there can be no cache."""
    try:
        cache = _open_cache()
        cache.write(_name(stamp), digest.encode())
        cache.remove_old(_MAX_DIGESTS)
    except OSError:
        return


def list_unknown(folder: str, tokenizer_folder: str, noted: NotedFiles) -> dict[str, FileStamp]:
    """By its path, each noted file whose content nobody knows yet."""
    groups = (
        (folder, {**noted.weights, **noted.model, **noted.processors}),
        (tokenizer_folder, noted.tokenizer),
    )
    paths = {str(Path(place, name)): stamp for place, group in groups for name, stamp in group.items()}
    return {path: stamp for path, stamp in paths.items() if find_digest(stamp) is None}


def find_digests(unknown: Mapping[str, FileStamp]) -> None:
    """Read files to know later what they held. One that is not as noted any more is left out."""
    for path, stamp in unknown.items():
        try:
            if stamp_file(Path(path)) == stamp:
                compute_digest(Path(path), stamp)
        except OSError:
            continue


def _name(stamp: FileStamp) -> str:
    numbers = msgspec.structs.replace(stamp, blob="")
    return hashlib.sha256(msgspec.msgpack.encode(numbers)).hexdigest()[:32]


def _open_cache() -> PrivateCache:
    return PrivateCache.open(_CACHE_NAME)
