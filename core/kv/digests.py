"""Digests: which prompt beginnings an engine has cached, by which frontends choose among engines.

The hashes of the prefix index are secret. So each beginning of a prompt also has a name that frontends can
compute, and is reported while the index finds its block's hash. Nothing is noted before the first request for
a digest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from ...ipc.protocol.prefix_digest import HASH_SIZE_BYTES, EngineDigest, hash_prefixes, list_coarse_depths
from ..clients.origin import name_scope, read_client_salt
from ..scheduling.request import Request
from .kv_cache_manager import KVCacheManager

MAX_PREFIXES = 4096  # 32 kB of a digest


class Digests:
    """Makes the digests of an engine's live `requests` and its prefix cache."""

    def __init__(self, manager: KVCacheManager, requests: Mapping[str, Request]) -> None:
        self.are_wanted = False  # whether `make` was ever called
        self._manager = manager
        self._requests = requests
        # (scope, name) -> the block's hash; the newest last. Scopes do not see each other's.
        self._hashes: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._is_whole = True  # whether every name is in here that the index finds

    def note(self, request: Request) -> None:
        """The engine has admitted a request."""
        scope = name_scope(request.client)
        hashes, block_size = self._manager.hash_prompt(request), self._manager.block_size
        depths = list_coarse_depths(min(len(hashes), request.num_prompt_tokens // block_size))
        names = hash_prefixes(
            request.prompt_token_ids, read_client_salt(request.options.cache_salt, scope), block_size, depths
        )
        for depth, name in zip(depths, names, strict=True):
            self._hashes.pop((scope, name), None)
            self._hashes[scope, name] = hashes[depth - 1]
        while len(self._hashes) > MAX_PREFIXES:
            # The index forgets the oldest first: if it has forgotten this one, then also those before it.
            _, block_hash = self._hashes.popitem(last=False)
            self._is_whole = self._manager.pool.find(block_hash) is None

    def make(self, scope: str = "") -> EngineDigest:
        """The digest that clients of this scope see. Takes 1 ms with MAX_PREFIXES names."""
        if not self.are_wanted:
            self.are_wanted, self._is_whole = True, not self._requests and self._manager.pool.num_cached == 0
        find = self._manager.pool.find
        cached = [
            name
            for (its_scope, name), block_hash in self._hashes.items()
            if its_scope == scope and find(block_hash) is not None
        ]
        pending = sum(
            max(0, request.num_prompt_tokens - request.num_computed_tokens)
            for request in self._requests.values()
        )
        packed = b"".join(name.to_bytes(HASH_SIZE_BYTES, "little") for name in cached)
        return EngineDigest(packed, len(self._requests), pending, self._is_whole)
