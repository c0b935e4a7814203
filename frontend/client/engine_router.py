"""EngineRouter: which engine of a group a request goes to. Pure: no socket, no clock, no engine.

What a choice costs is counted in prompt tokens: those that wait there, a share for each request that runs,
less what the engine has of the prompt. So conversations stay where their beginning is, unless that engine has
so much more to do that it is cheaper to compute it again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from ...ipc.protocol.messages import EngineCoreRequest
from ...ipc.protocol.prefix_digest import HASH_SIZE_BYTES, EngineDigest, hash_prefixes, list_depths
from ...ipc.protocol.token_ids import count_token_ids


class _Cache:
    """What one engine is believed to have."""

    def __init__(self) -> None:
        # name -> (blocks that it stands for, longest name of its prompt); the least recently used first
        self.names: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.num_blocks = 0

    def add(self, name: int, num_blocks: int, longest: int) -> None:
        """It is the newest now."""
        self.forget(name)
        self.names[name] = num_blocks, longest
        self.num_blocks += num_blocks

    def forget(self, name: int) -> None:
        """Nothing happens if it is not here."""
        self.num_blocks -= self.names.pop(name, (0, 0))[0]

    def shrink(self, max_names: int, max_blocks: float = math.inf) -> None:
        """Forget what was used least recently, beyond these bounds."""
        while len(self.names) > max_names or self.num_blocks > max_blocks:
            self.forget(next(iter(self.names)))


class KnownPrefixes:
    """Which engine of a group has which prompt beginnings, as far as a client can tell: names by engine.

    It knows what it has sent where, forgets that as the engine's cache would, and takes over what engines
    say (prefix_digest.py). Believing in what is long gone has a price: requests with one beginning would go
    to each of two engines, which both had to compute it again, and each time put another one out of their
    caches.
    """

    def __init__(self, max_names: int, num_blocks: int | None = None) -> None:
        """max_names: of all engines together; num_blocks: of an engine's KV cache, None: not known."""
        self._max_names, self._max_blocks = max_names, num_blocks
        self._caches: dict[int, _Cache] = {}

    def __len__(self) -> int:
        return sum(len(cache.names) for cache in self._caches.values())

    def add_engine(self, index: int) -> None:
        """It is new, or it is back: nothing is known to be there."""
        self._caches[index] = _Cache()

    def remove_engine(self, index: int) -> None:
        """It has nothing any more; nothing happens if it is not here."""
        self._caches.pop(index, None)

    def note_prompt(self, index: int, depths: Sequence[int], names: Sequence[int]) -> None:
        """The engine gets, or has computed, a prompt with these names, the longest last."""
        if not names:
            return
        cache = self._caches[index]
        depth = depths[-1]
        # A cache gives up the end of a prompt first.
        for start, name in zip(reversed([0, *depths[:-1]]), reversed(names), strict=True):
            cache.add(name, depth - start, names[-1])
            depth = start
        max_blocks = math.inf if self._max_blocks is None else self._max_blocks
        cache.shrink(self._max_names // len(self._caches), max_blocks)

    def take_digest(self, index: int, digest: Collection[int], live: Iterable[int] | None) -> None:
        """What an engine has told, the newest last. `live`: names that it will have soon; all others that
        it has not told are forgotten. None: it has more than it tells.
        """
        cache = self._caches[index]
        names = cache.names
        if live is not None:
            kept = {*digest, *live}
            gone = [name for name, (_, last) in names.items() if name not in kept and last not in kept]
            for name in gone:
                cache.forget(name)
        for name in digest:
            if name not in names:
                cache.add(name, 0, name)
        cache.shrink(self._max_names // len(self._caches))

    def find_depths(self, depths: Sequence[int], names: Sequence[int]) -> dict[int, int]:
        """Number of an engine -> blocks of the longest beginning that it is believed to have."""
        deepest: dict[int, int] = {}
        for index, cache in self._caches.items():
            for depth, name in zip(reversed(depths), reversed(names), strict=True):
                if name in cache.names:
                    deepest[index] = depth
                    break
        return deepest


REQUEST_TOKENS = 32  # what a request that runs delays another one by, in prompt tokens
# What is computed again also takes the place of something else in a cache. Of 64 conversations over 16
# prefixes, 16 at a time, with cache for half of them in each of 2 engines (played), 84 % of what could be
# found was found with a worth of 1, 99 % with 2, and no more with 3.
CACHED_TOKEN_WORTH = 2
MAX_PREFIXES = 65_536  # names that are remembered, of all engines together; 13 MB


class _Engine(msgspec.Struct):
    index: int
    takes_new: bool = True
    num_requests: int = 0
    num_pending_tokens: int = 0  # of prompts without an output
    num_others: int = 0  # other clients' requests, by its last digest
    num_others_pending: int = 0

    @property
    def load(self) -> int:
        """What is to be done there before another request's prompt, in prompt tokens."""
        pending = self.num_pending_tokens + self.num_others_pending
        return pending + REQUEST_TOKENS * (self.num_requests + self.num_others)


class _Placed(msgspec.Struct):
    engine: _Engine
    num_pending_tokens: int
    depths: Sequence[int] = ()
    names: Sequence[int] = ()  # of the prompt's beginnings, at `depths`


class EngineRouter:
    """Knows which prompt beginnings it has sent where, and what engines say of themselves."""

    def __init__(
        self, block_size: int, max_prefixes: int = MAX_PREFIXES, start: int = 0, num_blocks: int | None = None
    ) -> None:
        """block_size: of the engines' KV blocks; 0: they have none, and only load counts. num_blocks: that an
        engine has, None if that is not known. start: the engine where ties go first, so that frontends do not
        all begin with the same.
        """
        self._block_size = block_size
        self._engines: dict[int, _Engine] = {}
        self._placed: dict[str, _Placed] = {}
        self._prefixes = KnownPrefixes(max_prefixes, num_blocks)
        self._next_index = start  # where ties go

    def add_engine(self, index: int) -> None:
        """There is one more, or one that was lost is back: nothing is known to be there."""
        engine = self._engines.setdefault(index, _Engine(index))
        engine.num_others = engine.num_others_pending = 0
        self._prefixes.add_engine(index)

    def remove_engine(self, index: int) -> None:
        """It is gone for good; its requests are to be removed, or placed again."""
        self._engines.pop(index, None)
        self._prefixes.remove_engine(index)

    def set_takes_new(self, index: int, takes_new: bool) -> None:
        """False: it gets a request only if no engine takes new ones."""
        self._engines[index].takes_new = takes_new

    def place(self, request: EngineCoreRequest, full: Collection[int] = ()) -> int:
        """Choose the engine for a request, which counts as its load until `remove`. Engines that are `full`
        get it only if no other takes new ones.
        """
        num_tokens = count_token_ids(request.prompt_token_ids) + count_token_ids(request.output_token_ids)
        depths, names = self._name_prefixes(request)
        cached = self._prefixes.find_depths(depths, names)
        index = self.choose(cached, full)
        num_cached = cached.get(index, 0) * self._block_size
        self._prefixes.note_prompt(index, depths, names)
        placed = _Placed(self._engines[index], num_tokens - num_cached, depths, names)
        self._enter(request.request_id, placed)
        return index

    def place_at(self, request_id: str, index: int) -> None:
        """A request that is at this engine already."""
        self._enter(request_id, _Placed(self._engines[index], 0))

    def find(self, request_id: str) -> int | None:
        """The engine of a request, None if it is not here."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.engine.index

    def remove(self, request_id: str) -> None:
        """It has ended, or is to be placed again; nothing happens if it is not here."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            placed.engine.num_requests -= 1
            placed.engine.num_pending_tokens -= placed.num_pending_tokens
            if placed.names and self._engines.get(placed.engine.index) is placed.engine:
                # What it held could not be given up, and is the newest now.
                self._prefixes.note_prompt(placed.engine.index, placed.depths, placed.names)

    def note_output(self, request_id: str) -> None:
        """Its prompt has been computed."""
        placed = self._placed.get(request_id)
        if placed is not None and placed.num_pending_tokens:
            placed.engine.num_pending_tokens -= placed.num_pending_tokens
            placed.num_pending_tokens = 0

    def take_digest(self, index: int, digest: EngineDigest) -> None:
        """What an engine says that it has and does."""
        engine = self._engines[index]
        engine.num_others = max(0, digest.num_requests - engine.num_requests)
        engine.num_others_pending = max(0, digest.num_pending_tokens - engine.num_pending_tokens)
        data = digest.prefixes
        starts = range(0, len(data) - HASH_SIZE_BYTES + 1, HASH_SIZE_BYTES)
        names = [int.from_bytes(data[start : start + HASH_SIZE_BYTES], "little") for start in starts]
        live = None
        if digest.is_whole:
            its = [placed for placed in self._placed.values() if placed.engine is engine]
            live = [name for placed in its for name in placed.names]
        self._prefixes.take_digest(index, names, live)

    def forget_others(self) -> None:
        """Drop what engines have said of other clients' requests: it is too old."""
        for engine in self._engines.values():
            engine.num_others = engine.num_others_pending = 0

    def _enter(self, request_id: str, placed: _Placed) -> None:
        self.remove(request_id)  # one that could not be handed over is placed a second time
        self._placed[request_id] = placed
        placed.engine.num_requests += 1
        placed.engine.num_pending_tokens += placed.num_pending_tokens

    def _name_prefixes(self, request: EngineCoreRequest) -> tuple[list[int], list[int]]:
        params = request.pooling_params or request.sampling_params
        if not self._block_size or not params.reads_prefix_cache:
            return [], []
        # As in the engine, the last token is computed in any case.
        num_blocks = (count_token_ids(request.prompt_token_ids) - 1) // self._block_size
        depths = list_depths(num_blocks)
        return depths, hash_prefixes(
            request.prompt_token_ids, request.options.cache_salt, self._block_size, depths
        )

    def choose(self, cached: Mapping[int, int], full: Collection[int]) -> int:
        """The engine for a request of whose prompt each has so many blocks `cached`."""
        able = [engine for engine in self._engines.values() if engine.takes_new]
        able = [engine for engine in able if engine.index not in full] or able
        able = able or list(self._engines.values())
        # Those from `_next_index` on come first, so that ties go round.
        able.sort(key=lambda engine: (engine.index < self._next_index, engine.index))
        worth = CACHED_TOKEN_WORTH * self._block_size
        best = min(able, key=lambda engine: engine.load - worth * cached.get(engine.index, 0))
        self._next_index = best.index + 1
        return best.index
