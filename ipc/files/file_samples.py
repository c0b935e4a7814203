"""What a large file holds, by samples of it: to read all of it would take as long as loading it."""

from __future__ import annotations

import hashlib
from pathlib import Path

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def add_samples(digest: hashlib._Hash, path: Path) -> None:  # pyright: ignore[reportPrivateUsage]
    """Of weights: the size, and pieces from all over it, the first with the names and places of its tensors.

    Raises OSError.
    """
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(size * sample // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))


def hash_samples(path: Path) -> str:
    """SHA-256 of them, in hex. Raises OSError."""
    digest = hashlib.sha256()
    add_samples(digest, path)
    return digest.hexdigest()
