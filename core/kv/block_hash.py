"""Names of full KV blocks by content: equal names mean equal K and V, wherever they were computed.

A block's hash covers its own token ids and its parent's hash, and so everything before it; the root covers
whatever else K and V depend on. Keyed per process: nobody outside can construct two prompts that collide.
"""

from __future__ import annotations

import hashlib
import os

from ...ipc.model_spec import ModelSpec
from ...ipc.token_ids import TOKEN_SIZE_BYTES
from ..scheduling.request import Request

HASH_SIZE_BYTES = 16
SEED_SIZE_BYTES = 32


class BlockHasher:
    """Hashes the blocks of requests, each block once in a request's life."""

    def __init__(self, block_size: int, spec: ModelSpec, seed: bytes | None = None) -> None:
        self._block_size = block_size
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._key = os.urandom(SEED_SIZE_BYTES) if seed is None else seed[: hashlib.blake2b.MAX_KEY_SIZE]
        rope = spec.rope
        self._has_dynamic_rope = rope.type == "dynamic"
        self._original_length = rope.original_max_position_embeddings or spec.max_position_embeddings

    def extend(self, request: Request) -> list[bytes]:
        """Bring `request.block_hashes` up to all full blocks of its known tokens, and return it."""
        hashes = request.block_hashes
        num_missing = request.num_tokens // self._block_size - len(hashes)
        if num_missing <= 0:
            return hashes
        parent = hashes[-1] if hashes else self._root_of(request)
        start = len(hashes) * self._block_size
        packed = request.packed_tokens(start, start + num_missing * self._block_size)
        step, key, blake2b = self._block_size_bytes, self._key, hashlib.blake2b
        for offset in range(0, len(packed), step):
            data = parent + packed[offset : offset + step]
            parent = blake2b(data, digest_size=HASH_SIZE_BYTES, key=key).digest()
            hashes.append(parent)
        return hashes

    def _root_of(self, request: Request) -> bytes:
        """The parent of a request's first block: what K and V depend on beside the tokens before them."""
        length = request.num_prompt_tokens
        # Dynamic rope takes its base from the prompt's length once that exceeds the trained one.
        rope_length = length if self._has_dynamic_rope and length > self._original_length else 0
        data = rope_length.to_bytes(8, "little") + request.cache_salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=HASH_SIZE_BYTES, key=self._key, person=b"root").digest()
