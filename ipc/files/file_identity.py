"""Whether a file is still the one that an engine was started with. Later readers check before and after.

A file is identified by its stamp, which costs a system call. A file that was written again, moved or copied
back with the same content has another stamp: then SHA-256 decides, if the old one is known. It is computed
once a file, after a start (`find_digests`), and kept by the stamp. What is written again before that, in the
first seconds of a model's first start, is refused also where it is the same: nobody knows what was there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..errors import FilesChangedError, ModelError, shorten_name
from ..network.served_files import find_model_files, find_tokenizer_files

_BLOB_NAME = re.compile(r"[0-9a-f]{64}")  # of a large file in the hub's cache: its SHA-256
_CACHE_NAME = "digests"
_MAX_DIGESTS = 4096
CLOCK_TICK_NS = 20_000_000  # file systems take the time of the last timer interrupt: up to 10 ms ago
_SHOWN = 12  # characters of a hash
_REMEDY = "start the engine anew for what is there now (`quire daemon restart NAME`)"


class FileStamp(msgspec.Struct, array_like=True, frozen=True):
    """What identifies a file without reading it. Unlike `mtime_ns`, `ctime_ns` cannot be set back."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    blob: str = ""  # its SHA-256, if it is the file's name in the hub's cache


Stamps = Mapping[str, FileStamp]  # by the file's name in its folder, or its whole path


class NotedFiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model's files at an engine's start: those that workers read, and those that frontends read."""

    weights: dict[str, FileStamp] = {}
    model: dict[str, FileStamp] = {}
    tokenizer: dict[str, FileStamp] = {}
    processors: dict[str, FileStamp] = {}  # modules of the operator's logits processors, by whole path


def stamp_file(path: Path) -> FileStamp:
    """The stamp of a file; symbolic links are followed. Raises OSError."""
    status = path.stat()
    name = os.path.basename(os.path.realpath(path))
    blob = name if _BLOB_NAME.fullmatch(name) else ""
    return FileStamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, blob)


def note_model(
    folder: str, tokenizer_folder: str, weight_files: Iterable[str], processors: Iterable[str] = ()
) -> NotedFiles:
    """The stamps of all files of a model. Raises ModelError for missing weights."""
    return NotedFiles(
        weights=note_files(folder, weight_files),
        model=note_files(folder, find_model_files(folder)),
        tokenizer=note_files(tokenizer_folder, find_tokenizer_files(tokenizer_folder)),
        processors=note_files("", processors),
    )


def check_served(noted: NotedFiles | None, folder: str, tokenizer_folder: str) -> None:
    """Raise FilesChangedError if a file that frontends read has changed. None: nothing was noted."""
    if noted is not None:
        check_files(folder, noted.model, find_model_files(folder))
        check_files(tokenizer_folder, noted.tokenizer, find_tokenizer_files(tokenizer_folder))


def check_loaded(noted: NotedFiles | None, folder: str, tokenizer_folder: str) -> None:
    """The same for the files that a worker reads: the weights, and for grammars the tokenizer."""
    if noted is not None:
        check_files(folder, {**noted.weights, **noted.processors})
        check_tokenizer(noted, tokenizer_folder)


def check_tokenizer(noted: NotedFiles | None, tokenizer_folder: str) -> None:
    """The same for the file that says which text a token is."""
    if noted is not None:
        check_files(tokenizer_folder, {k: v for k, v in noted.tokenizer.items() if k == "tokenizer.json"})


def note_files(folder: str, names: Iterable[str]) -> dict[str, FileStamp]:
    """The stamps of files of a folder. Raises ModelError for a missing one.

    Where one has just been written, this waits until the clock by which the kernel stamps files is past its
    stamp: what is written from then on has another.
    """
    names = list(names)
    try:
        stamps = {name: stamp_file(Path(folder, name)) for name in names}
        newest_ns = max((stamp.ctime_ns for stamp in stamps.values()), default=0)
        if 0 <= time.time_ns() - newest_ns < CLOCK_TICK_NS:
            time.sleep(CLOCK_TICK_NS / 1e9)
            stamps = {name: stamp_file(Path(folder, name)) for name in names}
        return stamps
    except OSError as error:
        raise ModelError(
            "model", str(error.filename), f"a file that can be read ({error.strerror})"
        ) from None


def check_files(folder: str, noted: Stamps, present: Iterable[str] | None = None) -> None:
    """Raise FilesChangedError for the first file that is not as noted.

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
    """How the file differs from the noted one, '' if it does not.

    Reads all of it if only the stamp differs, which takes a second a GB.
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
    """SHA-256 in hex of the file that had this stamp; None if it was not computed."""
    if stamp.blob:
        return stamp.blob
    from .private_cache import CacheUnusableError, PrivateCache

    try:
        content = PrivateCache.open(_CACHE_NAME).read(_name(stamp))
    except CacheUnusableError:
        return None
    return None if content is None else content.decode("ascii", "replace")


def compute_digest(path: Path, stamp: FileStamp) -> str:
    """SHA-256 of a file that has this stamp, which is kept for `find_digest`. Raises OSError."""
    known = find_digest(msgspec.structs.replace(stamp, blob=""))
    if known is not None:
        return known
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "it is no regular file", str(path))
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stamp_file(path) == stamp:  # else it was written meanwhile
        from .private_cache import PrivateCache

        with contextlib.suppress(OSError):  # there can be no cache
            cache = PrivateCache.open(_CACHE_NAME)
            cache.write(_name(stamp), digest.encode())
            cache.remove_old(_MAX_DIGESTS)
    return digest


def list_unknown(folder: str, tokenizer_folder: str, noted: NotedFiles) -> dict[str, FileStamp]:
    """Path -> stamp of each noted file whose digest is not known yet."""
    groups = (
        (folder, {**noted.weights, **noted.model, **noted.processors}),
        (tokenizer_folder, noted.tokenizer),
    )
    paths = {str(Path(place, name)): stamp for place, group in groups for name, stamp in group.items()}
    return {path: stamp for path, stamp in paths.items() if find_digest(stamp) is None}


def find_digests(unknown: Mapping[str, FileStamp]) -> None:
    """Compute and keep the digests of files; one that has changed is skipped."""
    for path, stamp in unknown.items():
        try:
            if stamp_file(Path(path)) == stamp:
                compute_digest(Path(path), stamp)
        except OSError:
            continue


def _name(stamp: FileStamp) -> str:
    numbers = msgspec.structs.replace(stamp, blob="")
    return hashlib.sha256(msgspec.msgpack.encode(numbers)).hexdigest()[:32]
