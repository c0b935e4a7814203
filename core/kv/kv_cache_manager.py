"""KVCacheManager: which blocks a request holds, and which of them others may share.

A request gets the blocks of all its known tokens when it is admitted and one more whenever decoding fills
the last. Blocks stay until the request ends, also behind a sliding window.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Container, Iterable
from functools import lru_cache

from ...ipc.protocol.token_ids import TOKEN_SIZE_BYTES
from ...ipc.spec.model_spec import ModelSpec, has_dynamic_rope
from ..scheduling.request import NEVER, Request
from .block_pool import BlockPool
from .prefix_misses import PrefixMiss, PrefixMisses

HASH_SIZE_BYTES = 16
SEED_SIZE_BYTES = 32


class BlockHasher:
    """Names full KV blocks by content, each block once in a request's life.

    Equal names mean equal K and V: a block's hash covers its token ids and its parent's hash, hence all
    tokens before it, and the root covers whatever else K and V depend on. Hashes are keyed per process, so
    that nobody outside can construct two prompts that collide.
    """

    def __init__(self, block_size: int, spec: ModelSpec, seed: bytes | None = None) -> None:
        self._block_size = block_size
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._key = os.urandom(SEED_SIZE_BYTES) if seed is None else seed[: hashlib.blake2b.MAX_KEY_SIZE]
        self._has_dynamic_rope = has_dynamic_rope(spec)
        self._original_length = spec.max_position_embeddings
        self._hash_prompt = lru_cache(maxsize=8)(self._hash)  # keeps prompts: few

    def extend(self, request: Request) -> list[bytes]:
        """Extend `request.block_hashes` to all full blocks of its known tokens, and return it."""
        hashes = request.block_hashes
        num_full = request.num_tokens // self._block_size
        if num_full <= len(hashes):
            return hashes
        if request.is_continued and not hashes:  # others come with the same prompt
            size_bytes = len(request.prompt_token_ids) // self._block_size_bytes * self._block_size_bytes
            hashes += self._hash_prompt(self._root_of(request), request.prompt_token_ids[:size_bytes])
        parent = hashes[-1] if hashes else self._root_of(request)
        start = len(hashes) * self._block_size
        hashes += self._hash(parent, request.packed_tokens(start, num_full * self._block_size))
        return hashes

    def _hash(self, parent: bytes, packed: bytes) -> list[bytes]:
        """The names of full blocks that follow `parent`."""
        hashes: list[bytes] = []
        step, key, blake2b = self._block_size_bytes, self._key, hashlib.blake2b
        for offset in range(0, len(packed), step):
            data = parent + packed[offset : offset + step]
            parent = blake2b(data, digest_size=HASH_SIZE_BYTES, key=key).digest()
            hashes.append(parent)
        return hashes

    def name_tail(self, request: Request, num_tokens: int) -> bytes | None:
        """The name of the block that its first `num_tokens` tokens fill in part; None if there is none."""
        num_full, num_rest = divmod(num_tokens, self._block_size)
        if not num_rest:
            return None
        hashes = self.extend(request)
        parent = hashes[num_full - 1] if num_full else self._root_of(request)
        data = parent + request.packed_tokens(num_full * self._block_size, num_tokens)
        return hashlib.blake2b(data, digest_size=HASH_SIZE_BYTES, key=self._key).digest()

    def _root_of(self, request: Request) -> bytes:
        """The parent of a request's first block: what K and V depend on beside the tokens before them."""
        length = request.num_prompt_tokens
        # Dynamic rope takes its base from the prompt's length once that exceeds the trained one.
        rope_length = length if self._has_dynamic_rope and length > self._original_length else 0
        data = rope_length.to_bytes(8, "little") + request.options.cache_salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=HASH_SIZE_BYTES, key=self._key, person=b"root").digest()


class KVCacheManager:
    """Allocates blocks of a BlockPool to requests and keeps the prefix index."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        hasher: BlockHasher | None,
        misses: PrefixMisses | None = None,
        *,
        has_kv: bool = True,
        can_pool_hits: bool = True,
    ) -> None:
        """`hasher` None turns prefix caching off. `misses` explains why a prefix was not found.

        has_kv: False for a model whose requests need no blocks. can_pool_hits: whether a prompt with a prefix
        hit can be pooled.
        """
        self.pool = pool
        self.block_size = block_size
        self._hasher = hasher
        self._misses = misses or PrefixMisses(block_size)
        self.has_kv = has_kv
        self._can_pool_hits = can_pool_hits

    def count_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size) if self.has_kv else 0

    def reads_cache(self, request: Request) -> bool:
        """False if every token must be computed: caching is off, or the request asks for it."""
        if self._hasher is None:
            return False
        if request.pooling_params is not None:
            return self._can_pool_hits and request.pooling_params.reads_prefix_cache
        return request.sampling_params.reads_prefix_cache

    def find_prefix(self, request: Request) -> list[int]:
        """The blocks of the longest cached prefix. The last token is never among them: it is computed, to
        sample the next one or to be pooled.
        """
        if self._hasher is None or not self.reads_cache(request):
            return []
        hits: list[int] = []
        max_hits = self._max_hits(request)
        find = self.pool.find
        for block_hash in self._hasher.extend(request)[:max_hits]:
            block_id = find(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def find_tail(self, request: Request, hits: list[int]) -> int | None:
        """The block after `hits` with all that is left of a request but its last token, if one has it.

        Looked for by requests that `is_continued` says, and left by them (`index_tail`).
        """
        if not request.is_continued or self._hasher is None or not self.reads_cache(request):
            return None
        if len(hits) < self._max_hits(request):
            return None
        name = self._hasher.name_tail(request, request.num_tokens - 1)
        return None if name is None else self.pool.find(name)

    def hash_prompt(self, request: Request) -> list[bytes]:
        """The hashes of its full blocks, by which other requests find them; none if it reads no cache."""
        return self._hasher.extend(request) if self._hasher is not None and self.reads_cache(request) else []

    def explain_miss(self, request: Request) -> tuple[PrefixMiss | None, int]:
        """Why an admitted request's prefix was not found whole (None: it was); how many tokens were not."""
        num_hits, max_hits = request.num_computed_tokens // self.block_size, self._max_hits(request)
        return self._misses.explain(request, num_hits, max_hits), (max_hits - num_hits) * self.block_size

    def count_taken(self, request: Request, hits: list[int]) -> int:
        """By how much `allocate` lowers `num_free`. A hit may be a free block, which stops being free."""
        is_free = self.pool.is_free
        return self.count_blocks(request.num_tokens) - len(hits) + sum(map(is_free, hits))

    def count_freed(self, request: Request, wanted: Container[int]) -> int:
        """By how much `free` would raise `num_free`, not counting the blocks in `wanted`."""
        is_held_once = self.pool.is_held_once
        return sum(is_held_once(block_id) for block_id in request.block_ids if block_id not in wanted)

    def allocate(self, request: Request, hits: list[int], reserve: int, tail: int | None = None) -> bool:
        """Give an admitted request the blocks of all its known tokens, those of its prefix hit first.

        tail: as `find_tail` says. If nobody holds it the request has it from now on, else a block into which
        it is to be copied. False, with nothing changed, if fewer than `reserve` blocks would be left free.
        """
        shared = hits if tail is None or not self.pool.is_free(tail) else [*hits, tail]
        if self.count_taken(request, shared) + reserve > self.pool.num_free:
            return False
        for block_id in shared:  # first: taking a block could evict a hit
            self.pool.acquire(block_id)
        num_new = self.count_blocks(request.num_tokens) - len(shared)
        request.block_ids = shared + self.pool.take(num_new)
        request.num_computed_tokens = len(hits) * self.block_size if tail is None else request.num_tokens - 1
        request.num_indexed_blocks = len(hits)
        if self._hasher is not None:
            # A tail keeps its name for others that look for it in this step, also when this one fills it.
            request.next_index_at = (len(hits) + 1) * self.block_size if tail is None else NEVER
        return True

    def grow(self, request: Request) -> int | None:
        """Give a request that has filled its last block one more; None if none is free."""
        if self.pool.num_free == 0:
            return None
        (block_id,) = self.pool.take(1)
        request.block_ids.append(block_id)
        return block_id

    def index_full_blocks(self, request: Request, indexed: list[int]) -> None:
        """Make blocks findable that are full of known tokens, and add the ids of the new ones to `indexed`.

        "Computed" includes steps in flight: whoever finds such a block runs in the same step or a later one,
        and a step writes all its K and V before it reads any. If the step that fills them fails, the caller
        gives `indexed` to `forget`. A block with a placeholder is not findable: its content has no name yet.
        """
        assert self._hasher is not None
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_indexed_blocks:
            return
        hashes = self._hasher.extend(request)
        for i in range(request.num_indexed_blocks, num_full):
            if self.pool.register(request.block_ids[i], hashes[i]):
                indexed.append(request.block_ids[i])
        request.num_indexed_blocks = num_full
        request.next_index_at = (num_full + 1) * self.block_size

    def index_tail(self, request: Request) -> None:
        """Make findable all that a request which ends well leaves, also what does not fill its last block."""
        if self._hasher is None or request.pooling_params is not None:
            return
        num_computed = request.num_computed_tokens = request.num_tokens - 1  # its last token need not be
        self.index_full_blocks(request, [])
        if (name := self._hasher.name_tail(request, num_computed)) is not None:
            self.pool.register(request.block_ids[num_computed // self.block_size], name)

    def free(self, request: Request) -> None:
        """Release all blocks, the last one first: a prefix is then evicted from its end, the least useful."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_indexed_blocks = 0
        request.next_index_at = NEVER

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make these blocks unfindable: their contents are not what their hashes say."""
        for block_id in block_ids:
            self.pool.unregister(block_id)

    def forget_contents(self, request: Request) -> None:
        """Make what this request has computed unfindable, whichever blocks hold it now."""
        block_ids = [self.pool.find(block_hash) for block_hash in request.block_hashes]
        self.forget(block_id for block_id in block_ids if block_id is not None)

    def _max_hits(self, request: Request) -> int:
        """How many blocks may be hits: the last token is always computed."""
        return (request.num_tokens - 1) // self.block_size

    def check(self, requests: Iterable[Request]) -> list[str]:
        """The problems found between the pool and the requests that hold blocks."""
        owners: dict[int, list[tuple[Request, int]]] = {}
        for request in requests:
            for position, block_id in enumerate(request.block_ids):
                owners.setdefault(block_id, []).append((request, position))
        problems = self.pool.check(Counter({block_id: len(held) for block_id, held in owners.items()}))
        size = self.block_size
        for block_id, held in owners.items():
            contents = {(at, request.packed_tokens(at * size, (at + 1) * size)) for request, at in held}
            if len(held) > 1 and len(contents) > 1:
                ids = ", ".join(request.request_id for request, _ in held)
                problems.append(f"block {block_id}: shared by {ids} with different contents")
        return problems
