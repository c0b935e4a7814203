"""What of Quire runs here: nodes of a cluster must run the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...ipc.processes.child_args import PACKAGE_DIR

_FOLDERS = ("core", "ipc", "kernels", "worker")
_SUFFIXES = (".cpp", ".h", ".py")
_SHOWN = 12


def compute_source_digest() -> str:
    """Equal for the same sources of what a node runs. Raises OSError."""
    digest, root = hashlib.sha256(), Path(PACKAGE_DIR)
    files = (path for folder in _FOLDERS for path in sorted((root / folder).rglob("*")))
    for path in files:
        if path.suffix in _SUFFIXES:
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_SHOWN]
