"""Whether Quire's sources have changed since this process started.

A process starts children of its own sources only: after `pip install -U` or `git pull` an old core would get
a worker of another version, and one answer would have tokens of both. Sources are noted after the first start
of a child, and checked before each further one: 3 ms if nothing has changed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import FilesChangedError

PACKAGE_DIR = str(Path(__file__).absolute().parents[2])  # links not resolved, as in a child's path
_FOLDERS = ("core", "frontend", "ipc", "kernels", "worker")
_SUFFIXES = (".cpp", ".h", ".json", ".py")
# Other packages that decide bits or texts; the name of a folder beside each has its version.
_DISTRIBUTIONS = frozenset(
    ("flashinfer_python", "jinja2", "llguidance", "numpy", "safetensors", "tokenizers", "torch", "triton")
)
_MISSING = "not installed"
_VERSION_SUFFIXES = (".dist-info", ".egg-info")
_REMEDY = "start anew what runs (`quire daemon restart NAME`; other programs: end and start them)"


class OwnSources:
    """The package in `root` as it is now. The constructor reads all of it, which takes some 10 ms."""

    def __init__(self, root: str = PACKAGE_DIR) -> None:
        self._root = root
        self._stamps = dict(_iterate_stamps(root))
        self._sums = {name: _hash(root, name) for name in self._stamps}
        self._versions = find_versions()

    @property
    def digest(self) -> str:
        """Equal for equal sources, wherever they lie."""
        digest = hashlib.sha256()
        for name, content in sorted(self._sums.items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()

    def check(self) -> None:
        """Raise FilesChangedError for the first file that was changed, added or removed, or a version."""
        stamps = dict(_iterate_stamps(self._root))
        if stamps != self._stamps:
            sums = {name: _hash(self._root, name) for name in stamps}
            for name in sorted(sums.keys() | self._sums.keys()):
                if sums.get(name) != self._sums.get(name):
                    change = "was added" if name not in self._sums else "has changed"
                    raise self._make_changed_error(name, change if name in sums else "was removed")
            self._stamps = stamps  # files may have been written again with the same content
        if change := find_other_version(self._versions):
            name, version, before = change
            raise FilesChangedError(name, version, f"{before} when this process started; {_REMEDY}")

    def _make_changed_error(self, name: str, change: str) -> FilesChangedError:
        what = f"this file of Quire {change} since this process started; {_REMEDY}"
        return FilesChangedError(os.path.basename(name), os.path.join(self._root, name), what)


_noted: OwnSources | None = None


def note_own_sources() -> OwnSources:
    """The sources as they were at the first call in this process."""
    global _noted
    if _noted is None:
        _noted = OwnSources()
    return _noted


def check_own_sources() -> None:
    """Raise FilesChangedError if the sources are not as noted, if they were noted."""
    if _noted is not None:
        _noted.check()


def find_versions() -> dict[str, str]:
    """The versions of the packages that decide bits, by the first of each on Python's path."""
    versions: dict[str, str] = {}
    for folder in dict.fromkeys(sys.path):
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith(_VERSION_SUFFIXES):
                package, _, version = name.rpartition(".")[0].partition("-")
                if (package := package.lower()) in _DISTRIBUTIONS:
                    versions.setdefault(package, version)
    return versions


_Stamp = tuple[int, int, int]


def _iterate_stamps(root: str) -> Iterator[tuple[str, _Stamp]]:
    """(name, stamp) of every source."""
    left = [""]
    while left:
        folder = left.pop()
        try:
            with os.scandir(f"{root}/{folder}") as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if name.endswith(_SUFFIXES):
                        status = entry.stat()
                        yield name, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                    elif (folder or name in _FOLDERS) and entry.name != "__pycache__" and entry.is_dir():
                        left.append(f"{name}/")
        except OSError:  # its files are then missing
            continue


def find_other_version(noted: dict[str, str]) -> tuple[str, str, str] | None:
    """A package whose version has changed, its version now, and its version before; None if there is none."""
    versions = find_versions()
    for name in sorted(versions.keys() | noted.keys()):
        now, before = versions.get(name, _MISSING), noted.get(name, _MISSING)
        if now != before:
            return name, now, f"was {before}"
    return None


def _hash(root: str, name: str) -> bytes:
    try:
        with open(f"{root}/{name}", "rb", buffering=0) as file:
            return hashlib.sha256(file.read()).digest()[:16]
    except OSError:
        return b""
