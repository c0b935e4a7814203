"""What an engine of a group says that it has cached: names of prompt beginnings, which frontends compute too.

Without a cache_salt whoever knows a text knows its names; with one, only who knows both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from .token_ids import TOKEN_SIZE_BYTES

HASH_SIZE_BYTES = 8
MAX_DEPTH = 1024  # blocks; 16k tokens tell engines apart
_FINE_DEPTH, _STRIDE = 64, 8  # every block up to here, then every eighth


class EngineDigest(msgspec.Struct, array_like=True, frozen=True):
    """What a frontend chooses between engines by."""

    prefixes: bytes  # names of beginnings that its prefix cache has, HASH_SIZE_BYTES each, the newest last
    num_requests: int  # that are live
    num_pending_tokens: int  # of their prompts, not yet computed
    is_whole: bool = True  # False: the cache has more beginnings than `prefixes` has room for


def list_depths(num_blocks: int) -> list[int]:
    """The lengths, in blocks, at which a prompt of so many is looked up; the longest last."""
    last = min(num_blocks, MAX_DEPTH)
    fine = min(last, _FINE_DEPTH)
    return [*range(1, fine + 1), *range(fine + _STRIDE, last + 1, _STRIDE)]


def list_coarse_depths(num_blocks: int) -> list[int]:
    """Those of `list_depths` that a digest has: powers of two, and the longest."""
    depths = list_depths(num_blocks)
    return [depth for depth in depths if depth == depths[-1] or depth & (depth - 1) == 0]


def hash_prefixes(prompt: bytes, cache_salt: str, block_size: int, depths: Iterable[int]) -> list[int]:
    """The name of each beginning of `depths` blocks, in rising order. `prompt`: packed token ids."""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    root = hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()
    running = hashlib.blake2b(root, digest_size=HASH_SIZE_BYTES, person=b"prefix")
    step, start = block_size * TOKEN_SIZE_BYTES, 0
    view = memoryview(prompt)
    names: list[int] = []
    for depth in depths:
        end = depth * step
        running.update(view[start:end])
        names.append(int.from_bytes(running.copy().digest(), "little"))
        start = end
    return names
