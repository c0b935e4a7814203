"""KnownPrefixes: which engine of a group has which prompt beginnings, as far as a client can tell.

It knows what it has sent where, forgets that as the engine's cache would, and takes over what engines say.
Believing in what is long gone has a price: requests with one beginning would go to each of two engines, which
both had to compute it again, and each time put another one out of their caches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

Owners = int  # a bit an engine


class _Cache:
    """What one engine is believed to have."""

    def __init__(self, owner: Owners) -> None:
        self.owner = owner
        # name -> (blocks that it stands for, longest name of its prompt); the least recently used first
        self.names: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.num_blocks = 0


class KnownPrefixes:
    """Names (prefix_digest.py) by engine."""

    def __init__(self, max_names: int, num_blocks: int | None = None) -> None:
        """max_names: of all engines together; num_blocks: of an engine's KV cache, None: not known."""
        self._max_names, self._max_blocks = max_names, num_blocks
        self._caches: dict[int, _Cache] = {}
        self._owners: dict[int, Owners] = {}  # of each name, so that not every engine has to be asked

    def __len__(self) -> int:
        return sum(len(cache.names) for cache in self._caches.values())

    def add_engine(self, index: int) -> None:
        """It is new, or it is back: nothing is known to be there."""
        self.remove_engine(index)
        taken = 0
        for cache in self._caches.values():
            taken |= cache.owner
        self._caches[index] = _Cache(~taken & (taken + 1))

    def remove_engine(self, index: int) -> None:
        """It has nothing any more; nothing happens if it is not here."""
        cache = self._caches.pop(index, None)
        if cache is not None:
            for name in cache.names:
                self._disown(name, cache.owner)

    def note_prompt(self, index: int, depths: Sequence[int], names: Sequence[int]) -> None:
        """The engine gets, or has computed, a prompt with these names, the longest last."""
        if not names:
            return
        cache = self._caches[index]
        depth = depths[-1]
        # A cache gives up the end of a prompt first.
        for start, name in zip(reversed([0, *depths[:-1]]), reversed(names), strict=True):
            self._own(cache, name, (depth - start, names[-1]))
            depth = start
        if self._max_blocks is not None:
            while cache.num_blocks > self._max_blocks:
                self._forget_oldest(cache)
        max_names = self._max_names // len(self._caches)
        while len(cache.names) > max_names:
            self._forget_oldest(cache)

    def take_digest(self, index: int, told: Collection[int], live: Iterable[int] | None) -> None:
        """What an engine has told, the newest last. `live`: names that it will have soon; all others that
        it has not told are forgotten. None: it has more than it tells.
        """
        cache = self._caches[index]
        names = cache.names
        if live is not None:
            kept = {*told, *live}
            gone = [name for name, (_, last) in names.items() if name not in kept and last not in kept]
            for name in gone:
                self._forget(cache, name)
        for name in told:
            if name not in names:
                self._own(cache, name, (0, name))
        max_names = self._max_names // len(self._caches)
        while len(names) > max_names:
            self._forget_oldest(cache)

    def find_depths(self, depths: Sequence[int], names: Sequence[int]) -> dict[int, int]:
        """Number of an engine -> blocks of the longest beginning that it is believed to have."""
        if not names:
            return {}
        engines = {cache.owner: index for index, cache in self._caches.items()}
        left = sum(engines)
        found: dict[int, int] = {}
        for depth, name in zip(reversed(depths), reversed(names), strict=True):
            owners = self._owners.get(name, 0) & left
            left ^= owners
            while owners:
                owner = owners & -owners
                found[engines[owner]] = depth
                owners ^= owner
            if not left:
                break
        return found

    def _own(self, cache: _Cache, name: int, entry: tuple[int, int]) -> None:
        old = cache.names.pop(name, None)
        cache.names[name] = entry
        cache.num_blocks += entry[0]
        if old is None:
            self._owners[name] = self._owners.get(name, 0) | cache.owner
        else:
            cache.num_blocks -= old[0]

    def _forget_oldest(self, cache: _Cache) -> None:
        self._forget(cache, next(iter(cache.names)))

    def _forget(self, cache: _Cache, name: int) -> None:
        cache.num_blocks -= cache.names.pop(name)[0]
        self._disown(name, cache.owner)

    def _disown(self, name: int, owner: Owners) -> None:
        owners = self._owners.pop(name) & ~owner
        if owners:
            self._owners[name] = owners
