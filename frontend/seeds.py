"""Seeds of requests that come without one."""

from __future__ import annotations

import hashlib
import itertools
import os


class SeedSource:
    """Draws from the system's entropy; or, with a seed of an engine's owner, the same ones in every run.

    Then the n-th request has the n-th seed, so a program that makes the same requests in the same order gets
    the same tokens again. Threads may share it; the order is then theirs.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def draw(self) -> int:
        """A seed of 63 bits for the next request; one with a seed of its own takes its turn too."""
        number = next(self._numbers)
        if self._seed is None:
            return int.from_bytes(os.urandom(8), "little") >> 1
        digest = hashlib.blake2b(f"{self._seed} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
