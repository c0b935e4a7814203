"""PrivateCache: a folder of things that can be made again, for all caches on disk.

What is read from it was written whole by this user, and is unchanged: only this user may write to folder and
entries, and an entry comes into place at once, with its checksum; otherwise it is made again. Several
processes may use a cache, and each may be killed at any moment. Without a usable cache (a full disk, a
read-only home) its user does without. Imports nothing of ours, as kernels use it, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

SCRATCH_PREFIX = "new-"  # of entries that are being made or removed
LISTING_NAME = ".quire-files.json"  # of what was downloaded into a folder of a cache
SEAL = b"quire-sha256:"  # then the digest, at a file's end; ELF ignores what follows its sections
SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size
MAX_SCRATCH_AGE_S = 3600.0  # an older one was left by a killed process
_LIST_NAME = "sealed.json"  # the checksums of a folder's files
_MAX_LIST_BYTES = 65536
_MAX_ATTEMPTS = 5
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheUnusableError(OSError):
    """A cache's folder cannot be made, or others could write to it; the text says why."""

    def __str__(self) -> str:
        return str(self.args[0])


def find_cache_home() -> Path:
    """The folder of this user's caches: $XDG_CACHE_HOME/quire or ~/.cache/quire."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


class PrivateCache:
    """One cache. Its `folder` is checked, and the path to it leads through no other user's link."""

    def __init__(self, folder: Path) -> None:
        """Check the folder, or make it with mode 0700. Raises CacheUnusableError."""
        try:
            _make_folders(folder)
            self.folder = folder.resolve(strict=True)
            reason = _find_strange_link(folder) or _find_fault(self.folder)
        except (OSError, RuntimeError) as error:
            text = getattr(error, "strerror", None) or error
            raise CacheUnusableError(f"{folder} cannot be made: {text}") from None
        if reason:
            raise CacheUnusableError(reason)

    @classmethod
    def open(cls, name: str) -> PrivateCache:
        """The cache of this name below `find_cache_home`. Raises CacheUnusableError."""
        try:
            return cls(find_cache_home() / name)
        except RuntimeError as error:  # no home
            raise CacheUnusableError(str(error)) from None

    # -- files

    def open_file(self, name: str) -> int | None:
        """A descriptor of an entry that only this user may write to; None if there is none."""
        try:
            descriptor = os.open(self.folder / name, _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note_fault(name, error.strerror or "it cannot be opened")
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and _is_own(status):
            return descriptor
        os.close(descriptor)
        self.note_fault(name, "it is no file that only this user may write to")
        return None

    def open_sealed(self, name: str) -> int | None:
        """As `open_file`; None also for an entry that was changed."""
        descriptor = self.open_file(name)
        if descriptor is None or is_sealed(descriptor):
            return descriptor
        os.close(descriptor)
        self.note_fault(name, "its checksum is another")
        return None

    def read(self, name: str) -> bytes | None:
        """What `write` has written; None if there is none."""
        descriptor = self.open_sealed(name)
        if descriptor is None:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()[:-SEAL_BYTES]

    def write(self, name: str, content: bytes) -> None:
        """Write a sealed file, which comes into place at once. Raises OSError and leaves nothing."""
        with self.scratch() as scratch:
            made = scratch / name
            made.write_bytes(content + SEAL + hashlib.sha256(content).digest())
            self.put(made)

    # -- folders

    def find_folder(self, name: str) -> Path | None:
        """A folder that `put_folder` has written; None if there is none or a file was changed."""
        path = self.folder / name
        if not os.path.lexists(path):
            return None
        reason = _find_damage(path)
        if reason:
            self.note_fault(name, reason)
            return None
        return path

    def put_folder(self, name: str, contents: Mapping[str, bytes]) -> Path:
        """Write a folder of files, which comes into place at once; one that another process wrote stays.

        Raises OSError and leaves nothing.
        """
        target = self.folder / name
        with self.scratch() as scratch:
            made = scratch / name
            made.mkdir(mode=0o700)
            sums = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
            for file, content in (*contents.items(), (_LIST_NAME, json.dumps(sums).encode())):
                _write_synced(made / file, content)
            for attempt in range(_MAX_ATTEMPTS):  # others may do the same
                try:
                    made.rename(target)
                    break
                except OSError:  # there is one already, or no room
                    if not _find_damage(target) and all((target / file).is_file() for file in contents):
                        break
                    if attempt == _MAX_ATTEMPTS - 1:
                        raise
                with contextlib.suppress(FileNotFoundError):
                    target.rename(scratch / f"{attempt}.old")
        return target

    # -- coming and going

    @contextlib.contextmanager
    def scratch(self, prefix: str = SCRATCH_PREFIX) -> Generator[Path]:
        """A folder in which to make an entry, which is removed afterwards."""
        made = Path(tempfile.mkdtemp(dir=self.folder, prefix=prefix))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def put(self, made: Path) -> Path:
        """Move a file that was made in a `scratch` into place, under its name. Raises OSError."""
        with made.open("rb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
        return made.replace(self.folder / made.name)

    def note_used(self, name: str) -> None:
        """Note that an entry is used now, for `remove_old`."""
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(self.folder / name, follow_symlinks=False)

    def note_fault(self, name: str, reason: str) -> None:
        """Log why an entry is made again."""
        _log.warning("%s is not used and is made again: %s", self.folder / name, reason)

    def remove_old(
        self,
        max_entries: int | None = None,
        max_bytes: int | None = None,
        *,
        pattern: str = "*",
        kept: str | None = None,
    ) -> None:
        """Remove the entries that were unused longest, beyond `max_entries` or `max_bytes`.

        The one used last stays, and those on which a process holds a lock, and `kept`, which does not count.
        Old scratch folders of killed processes are removed, too.
        """
        entries: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):  # another process removes them
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    entries.append((path.lstat().st_mtime, path))
        now, num_kept, total_bytes = time.time(), 0, 0
        for modified_at, path in sorted(entries, reverse=True):
            if path.name.startswith(SCRATCH_PREFIX):
                if now - modified_at > MAX_SCRATCH_AGE_S:
                    _remove(path)
                continue
            if path.name == kept or not path.match(pattern):
                continue
            total_bytes += _count_bytes(path)
            is_last = num_kept == 0 and kept is None
            is_too_many = max_entries is not None and num_kept >= max_entries
            is_too_much = max_bytes is not None and total_bytes > max_bytes
            if (is_too_many or is_too_much) and not is_last:
                self._remove_free(path)
            num_kept += 1

    def _remove_free(self, path: Path) -> None:
        """Remove an entry at once, unless a process holds a lock on it."""
        with lock_to_remove(path) as is_free, contextlib.suppress(OSError):
            if is_free:
                left = self.folder / f"{SCRATCH_PREFIX}{path.name}"
                path.rename(left)
                _remove(left)


def keep_entry(entry: str | int) -> None:
    """Let no process remove an entry until this one ends, as far as its file system has locks.

    `entry`: its path, or a descriptor, which must stay open.
    """
    with contextlib.suppress(OSError):
        descriptor = entry if isinstance(entry, int) else os.open(entry, _OPEN_FLAGS)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


@contextlib.contextmanager
def lock_to_remove(path: Path) -> Generator[bool]:
    """Whether no process keeps an entry; none can begin to inside. False if that cannot be known."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(descriptor)


def seal_file(path: Path) -> None:
    """Append a file's checksum to it. Raises OSError."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(SEAL + digest)


def is_sealed(descriptor: int) -> bool:
    """Whether a file ends with the checksum of all before it. Raises OSError."""
    left = os.fstat(descriptor).st_size - SEAL_BYTES
    if left < 0:
        return False
    digest, offset = hashlib.sha256(), 0
    while left > 0 and (part := os.pread(descriptor, min(left, 1 << 20), offset)):
        digest.update(part)
        offset, left = offset + len(part), left - len(part)
    return left == 0 and os.pread(descriptor, SEAL_BYTES, offset) == SEAL + digest.digest()


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & _OTHERS_WRITE


def _make_folders(folder: Path) -> None:
    """Make the folder and its missing parents, all private."""
    missing: list[Path] = []
    while not folder.exists() and not folder.is_symlink():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def _find_strange_link(folder: Path) -> str:
    """Why the path is not safe: another user's link in it, which could lead anywhere; '' without one."""
    for path in (folder, *folder.parents):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.getuid()):
            return f"{path} is another user's link"
    return ""


def _find_fault(folder: Path) -> str:
    """Why the contents of this folder cannot be trusted, '' if they can.

    Whatever others can do further up, they cannot replace it by a folder that this user owns.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    if status.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    return f"others may write to {folder}" if status.st_mode & _OTHERS_WRITE else ""


def _find_damage(folder: Path) -> str:
    """Which of a folder's files was changed, '' if none was."""
    try:
        if reason := _find_fault(folder):
            return reason
        listed = json.loads(_read_own(folder / _LIST_NAME, _MAX_LIST_BYTES))
        for name, digest in listed.items():
            if hashlib.sha256(_read_own(folder / name)).hexdigest() != digest:
                return f"{name} has another checksum"
        strange = {path.name for path in folder.iterdir()} - {*listed, _LIST_NAME}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"it is not whole ({error})"
    return f"{min(strange)} was not written with it" if strange else ""


def _read_own(file: Path, max_bytes: int | None = None) -> bytes:
    descriptor = os.open(file, _OPEN_FLAGS)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status):
            raise OSError(f"{file.name} is no file that only this user may write to")
        return opened.read() if max_bytes is None else opened.read(max_bytes)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _count_bytes(path: Path) -> int:
    try:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            return sum(file.lstat().st_size for file in path.iterdir())
        return status.st_size
    except OSError:  # another process removes it
        return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
