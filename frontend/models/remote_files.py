"""Fetches a model's files from an address that fsspec reads (s3://, gs://, https://, ...) into a local cache.

What the store says of each file (etag, checksum, time, size) names a version of the address; each version has
a folder. A file comes into place whole, and a folder is complete when the list of its files is there. So an
engine that runs keeps the files that it was started with, and the next start notices what was replaced.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from ...ipc.decoding import decode_json
from ...ipc.errors import ModelError, describe_install
from ...ipc.files.private_cache import (
    LISTING_NAME,
    CacheUnusableError,
    PrivateCache,
    find_cache_home,
    keep_entry,
)

_log = logging.getLogger(__name__)

ALLOWED = "an address of a folder that fsspec can list, such as s3://bucket/model, gs://... or https://..."
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "https", "https": "https"}
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")
# What tells one content of a file from another, the surest first, as file systems of fsspec name it.
_MD5_KEYS = ("md5Hash", "Content-MD5")  # base64, RFC 1864
_VERSION_KEYS = (*_MD5_KEYS, "ETag", "etag", "content_hash", "generation", "mtime", "LastModified")
_TIME_KEYS = ("Last-Modified", "last_modified", "modified", "updated", "created")
_MAX_FILES = 10_000
_MAX_FOLDERS = 100  # in the model's own; each is listed by a call
_CHUNK_BYTES = 8 << 20
_NUM_THREADS = 8  # of stores that take several calls at a time
_RETRY_AFTER_S = (0.5, 2.0, 8.0)  # where an attempt brought nothing


class _RemoteFile(msgspec.Struct, frozen=True):
    path: str  # as the store has it
    size: int | None  # None: the store does not say it
    version: str
    md5: str = ""  # in hex


_Listing = Mapping[str, _RemoteFile]  # by the name in the model's folder


class _ReplacedError(OSError):
    pass


def fetch_folder(
    address: str,
    field_name: str,
    patterns: Sequence[str],
    ignored: Sequence[str],
    download_dir: Path | None = None,
) -> Path:
    """A local folder of the files at an address that match a pattern and no ignored one. Raises ModelError.

    One process at a time downloads an address; it goes on where another was cut. Where the store does not
    answer, the version fetched last is taken, and a warning says so.
    """
    if _PASSWORD.search(address):
        shown = _PASSWORD.sub("://...@", address)
        raise ModelError(field_name, shown, f"{ALLOWED}, without a password, which others would see")
    store, root = _open_store(address, field_name)
    digest = hashlib.sha256("\0".join((address.rstrip("/"), *patterns)).encode()).hexdigest()[:12]
    prefix = f"{re.sub(r'[^A-Za-z0-9.]+', '_', address)[-48:].strip('._')}-{digest}"
    try:
        cache = PrivateCache(find_cache_home() / "models" if download_dir is None else download_dir / "quire")
        with _lock(cache.folder / f"{prefix}.lock", address):
            return _Download(cache, prefix, store, address, field_name).run(root, patterns, ignored)
    except CacheUnusableError as error:
        allowed = f"a folder for what is downloaded that only you may write to ({error})"
        raise ModelError("download_dir", str(download_dir or find_cache_home()), allowed) from error


def _open_store(address: str, field_name: str) -> tuple[Any, str]:
    """The file system of an address, and the path within it."""
    protocol = address.partition("://")[0]
    try:
        fsspec: Any = importlib.import_module("fsspec.core")
        store, root = fsspec.url_to_fs(address)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        install = str(error) if extra is None else describe_install(extra)
        raise ModelError(field_name, address, f"{ALLOWED}; only with: {install}") from error
    except Exception as error:  # a protocol that it does not know, or what the store's library raises
        raise ModelError(field_name, address, f"{ALLOWED} ({_first_line(error)})") from error
    store.invalidate_cache()  # of what an earlier call has listed
    return store, str(root).rstrip("/")


@contextlib.contextmanager
def _lock(file: Path, address: str) -> Generator[None]:
    with file.open("ab") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("another process is downloading %s; waiting for it", address)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


class _Download:
    def __init__(self, cache: PrivateCache, prefix: str, store: Any, address: str, field_name: str) -> None:
        self._cache, self._prefix, self._store = cache, prefix, store
        self._address, self._field_name = address, field_name
        self._is_ended = threading.Event()
        self._bar_lock = threading.Lock()

    def run(self, root: str, patterns: Sequence[str], ignored: Sequence[str]) -> Path:
        try:
            listing = self._list(root, patterns, ignored)
        except FileNotFoundError as error:
            raise self._refuse("has no such folder") from error
        except (PermissionError, ModelError) as error:
            raise self._refuse("cannot be listed", error) from error
        except Exception as error:  # each store's library raises errors of its own
            folder = self._find_last()
            if folder is None:
                raise self._refuse("cannot be listed", error) from error
            reason = _first_line(error)
            _log.warning("%s cannot be listed (%s): %s is used as it is", self._address, reason, folder)
        else:
            if not listing:
                raise self._refuse(f"has no file {', '.join(patterns)}")
            folder = self._fetch_all(listing)
        keep_entry(str(folder))
        self._cache.note_used(folder.name)
        return folder

    # -- what is there

    def _list(self, root: str, patterns: Sequence[str], ignored: Sequence[str]) -> dict[str, _RemoteFile]:
        """The files in the folder, and in those in it, that are wanted."""
        entries: list[dict[str, Any]] = self._store.ls(root, detail=True)
        folders = [each["name"].rstrip("/") for each in entries if each["type"] == "directory"]
        if len(folders) > _MAX_FOLDERS:
            raise self._refuse(f"has {len(folders)} folders, more than {_MAX_FOLDERS}")
        for folder in folders:
            if not any(fnmatchcase(f"{folder.rpartition('/')[2]}/x", pattern) for pattern in ignored):
                entries += [each for each in self._store.ls(folder, detail=True) if each["type"] == "file"]
        listing: dict[str, _RemoteFile] = {}
        for entry in entries:
            path = entry["name"]
            name = path.removeprefix(root).strip("/")
            is_within = path.startswith(f"{root}/") and name and not {"", ".", ".."} & set(name.split("/"))
            is_wanted = any(fnmatchcase(name, pattern) for pattern in patterns)
            if entry["type"] != "file" or not is_within or not is_wanted or not name.isprintable():
                continue
            if not any(fnmatchcase(name, pattern) for pattern in ignored):
                listing[name] = self._describe(path, entry)
        if len(listing) > _MAX_FILES:
            raise self._refuse(f"has {len(listing)} such files, more than {_MAX_FILES}")
        return dict(sorted(listing.items()))

    def _describe(self, path: str, entry: Mapping[str, Any]) -> _RemoteFile:
        if entry.get("size") is None or not _find_version(entry):
            entry = self._store.info(path)
        md5 = next((entry[key] for key in _MD5_KEYS if entry.get(key)), "")
        return _RemoteFile(path, entry.get("size"), _find_version(entry), base64.b64decode(md5).hex())

    def _find_last(self) -> Path | None:
        """The folder of the complete version that was used last."""
        folders = [each for each in self._cache.folder.glob(f"{self._prefix}-*") if _read_listing(each)]
        return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)

    # -- bringing it here

    def _fetch_all(self, listing: _Listing) -> Path:
        content = msgspec.json.encode(listing)
        folder = self._cache.folder / f"{self._prefix}-{hashlib.sha256(content).hexdigest()[:12]}"
        missing = _find_missing(folder, listing)
        if not missing and _read_listing(folder) == listing:
            return folder
        try:
            for name in missing:
                _make_folder(folder, name)
            self._copy_known(folder, missing)
            missing = _find_missing(folder, missing)
            self._check_room(folder, missing)
            self._fetch_missing(folder, missing)
            (folder / LISTING_NAME).write_bytes(content)
        except ModelError:
            raise
        except Exception as error:
            raise self._refuse("cannot be downloaded", error) from error
        self._cache.remove_old(0, pattern=f"{self._prefix}-*", kept=folder.name)
        return folder

    def _copy_known(self, folder: Path, missing: _Listing) -> None:
        """Take what has not changed from versions before; links would change the stamps that engines note."""
        for other in self._cache.folder.glob(f"{self._prefix}-*"):
            known = {} if other == folder else _read_listing(other)
            for name, file in missing.items():
                if file.version and known.get(name) == file:
                    part = _part_of(folder / name)
                    shutil.copyfile(other / name, part)
                    part.replace(folder / name)

    def _check_room(self, folder: Path, missing: _Listing) -> None:
        here = sum(_count_bytes(_part_of(folder / name)) for name in missing)
        needed = sum(file.size or 0 for file in missing.values()) - here
        free = shutil.disk_usage(self._cache.folder).free
        if needed > free:
            raise self._refuse(f"needs {needed} bytes in {self._cache.folder}, where {free} are free")

    def _fetch_missing(self, folder: Path, missing: _Listing) -> None:
        from tqdm import tqdm

        sizes = [file.size for file in missing.values()]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        here = sum(_count_bytes(_part_of(folder / name)) for name in missing)
        num_threads = _NUM_THREADS if self._store.async_impl else 1
        looks: dict[str, Any] = {"desc": self._address, "unit": "B", "unit_scale": True, "leave": False}
        bar: Any = tqdm(total=total, initial=here, disable=None, **looks)  # None: where nobody looks on
        with bar, ThreadPoolExecutor(num_threads) as pool:
            try:
                jobs = [pool.submit(self._fetch, folder / name, each, bar) for name, each in missing.items()]
                for job in jobs:
                    job.result()
            finally:
                self._is_ended.set()  # also of Ctrl-C: what has come stays for the next time
                pool.shutdown(cancel_futures=True)

    def _fetch(self, target: Path, file: _RemoteFile, bar: Any) -> None:
        """Download a file, again from where a cut was. Raises what the store does."""
        part, failures = _part_of(target), 0
        while True:
            before = _count_bytes(part)
            try:
                self._append(part, file, bar)
                break
            except (FileNotFoundError, PermissionError, _ReplacedError):
                raise
            except Exception as error:
                failures = 0 if _count_bytes(part) > before else failures + 1
                if self._is_ended.is_set() or failures > len(_RETRY_AFTER_S):
                    raise
                _log.info("%s was cut: %s", file.path, _first_line(error))
                self._is_ended.wait(_RETRY_AFTER_S[failures - 1] if failures else 0)
        part.replace(target)

    def _append(self, part: Path, file: _RemoteFile, bar: Any) -> None:
        with part.open("ab") as here, self._store.open(file.path, "rb", block_size=_CHUNK_BYTES) as there:
            if here.tell():
                try:
                    there.seek(here.tell())
                except (OSError, ValueError):  # a store that reads from the start only
                    here.truncate(0)
            while chunk := there.read(_CHUNK_BYTES):
                if self._is_ended.is_set():
                    raise OSError("another file has failed")
                here.write(chunk)
                with self._bar_lock:
                    bar.update(len(chunk))
            here.flush()
            os.fsync(here.fileno())
            num_bytes = here.tell()
        if file.size is not None and num_bytes < file.size:
            raise OSError(f"{num_bytes} of {file.size} bytes have come")
        self._store.invalidate_cache()
        # Listed again, and not asked for alone: some stores write times otherwise there.
        entries = self._store.ls(file.path.rpartition("/")[0], detail=True)
        now = [self._describe(file.path, entry) for entry in entries if entry["name"] == file.path]
        reason = "" if now == [file] else "it was replaced meanwhile: start again"
        if file.size is not None and num_bytes > file.size:
            reason = reason or f"{num_bytes} bytes have come, and it has {file.size}"
        if not reason and file.md5 and _compute_md5(part) != file.md5:
            reason = "its checksum is another: start again"
        if reason:
            part.unlink()
            raise _ReplacedError(f"{file.path}: {reason}")

    def _refuse(self, reason: str, error: Exception | None = None) -> ModelError:
        if isinstance(error, ModelError):
            return error
        details = "" if error is None else f": {_first_line(error)}"
        return ModelError(self._field_name, self._address, f"{ALLOWED} (it {reason}{details})")


def _find_version(entry: Mapping[str, Any]) -> str:
    keys = (key for key in (*_VERSION_KEYS, *_TIME_KEYS) if entry.get(key))
    return next((f"{key}={entry[key]}" for key in keys), "")


def _read_listing(folder: Path) -> dict[str, _RemoteFile]:
    """The files of a complete version; {} where one is missing."""
    try:
        listing = decode_json((folder / LISTING_NAME).read_bytes(), dict[str, _RemoteFile])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return listing if all(_is_whole(folder / name, file.size) for name, file in listing.items()) else {}


def _is_whole(path: Path, size: int | None) -> bool:
    return path.is_file() and (size is None or _count_bytes(path) == size)


def _find_missing(folder: Path, files: _Listing) -> dict[str, _RemoteFile]:
    return {name: file for name, file in files.items() if not _is_whole(folder / name, file.size)}


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.incomplete")


def _count_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _make_folder(folder: Path, name: str) -> None:
    for parent in reversed([Path(name).parent, *Path(name).parent.parents]):
        (folder / parent).mkdir(mode=0o700, exist_ok=True)


def _compute_md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
