"""PrefixMisses: why a prompt's beginning was not in the cache, for users who miss hits.

Its tables have a fixed size, and a new entry overwrites the old one in its place: a reason may be forgotten,
but is wrong only if 64-bit hashes collide. Costs 0.1 us an evicted block, 1 us a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import StrEnum

from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES
from ..scheduling.request import Request

_NUM_EVICTED = 2**15
_NUM_FIRST_BLOCKS = 2**12


class PrefixMiss(StrEnum):
    """Why the first block that was not found is not there."""

    UNKNOWN = "no such prefix"  # never seen, or forgotten
    EVICTED = "evicted"  # its block was reused
    NO_STATE = "no state"  # it is there, and no state of recurrent layers after it
    OTHER_SALT = "other salt"  # the same tenant has sent it with another cache_salt


class _HashTable:
    """A lossy map of 64-bit integers with `size` places, each of which keeps its newest entry."""

    def __init__(self, size: int) -> None:
        self._mask = size - 1
        self._size = size
        self._keys: array[int] | None = None  # made with the first entry: many engines never need it
        self._values: array[int] = array("q")

    def put(self, key: int, value: int = 0) -> None:
        if self._keys is None:
            self._keys = array("q", bytes(8 * self._size))
            self._values = array("q", bytes(8 * self._size))
        place = key & self._mask
        self._keys[place] = key
        self._values[place] = value

    def find(self, key: int) -> int | None:
        """The value of the key; None if it is not remembered."""
        place = key & self._mask
        return self._values[place] if self._keys is not None and self._keys[place] == key else None


class PrefixMisses:
    """Remembers evicted blocks, and the salts of prompts' first blocks."""

    def __init__(self, block_size: int) -> None:
        self._first_block_bytes = block_size * TOKEN_SIZE_BYTES
        self._evicted = _HashTable(_NUM_EVICTED)
        self._first_blocks = _HashTable(_NUM_FIRST_BLOCKS)

    def note_evicted(self, block_hash: bytes) -> None:
        """A block's content cannot be found any more."""
        self._evicted.put(hash(block_hash))

    def explain(
        self, request: Request, num_hits: int, max_hits: int, names: Iterable[bytes]
    ) -> PrefixMiss | None:
        """Why no more than `num_hits` of the `max_hits` blocks were found; None if all were.

        names: of the blocks of which one was missing for one more. The salts of different tenants are not
        compared: that would tell one what another has sent.
        """
        if max_hits == 0:
            return None
        salt = hash(request.options.cache_salt)
        first = hash((request.tenant.name, request.prompt_token_ids[: self._first_block_bytes]))
        known_salt = self._first_blocks.find(first)
        self._first_blocks.put(first, salt)
        if num_hits >= max_hits:
            return None
        if any(self._evicted.find(hash(name)) is not None for name in names):
            return PrefixMiss.EVICTED
        if num_hits == 0 and known_salt is not None and known_salt != salt:
            return PrefixMiss.OTHER_SALT
        return PrefixMiss.UNKNOWN
