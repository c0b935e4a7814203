"""TurnQueue: a queue in which owners take turns, each with a bound on what waits. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class TurnQueueFullError(Exception):
    """An owner has as much waiting as it may; the text has the numbers."""


@dataclass(slots=True)
class _Line(Generic[T]):
    """What one owner has waiting: items with their sizes."""

    items: deque[tuple[T, int]] = field(default_factory=deque[tuple[T, int]])
    size_bytes: int = 0


class TurnQueue(Generic[T]):
    """Items of several owners: each owner's in their order, and one of each owner in turn.

    max_items, max_bytes: what one owner may have waiting. max_total_bytes: what all may; past it only those
    are refused who have more than an equal part.
    """

    def __init__(self, max_items: int, max_bytes: int, max_total_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._lines: OrderedDict[str, _Line[T]] = OrderedDict()  # the next owner first; none is empty

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        return (item for line in self._lines.values() for item, _ in line.items)

    def put(self, owner: str, item: T, size_bytes: int) -> None:
        """Add an item. Raises TurnQueueFullError; an owner with nothing waiting may add one of any size."""
        line = self._lines.get(owner) or _Line[T]()
        if len(line.items) >= self._max_items:
            raise TurnQueueFullError(f"{len(line.items)} wait, and at most {self._max_items} may")
        limit = self._max_bytes
        total = sum(one.size_bytes for one in self._lines.values())
        if total + size_bytes > self._max_total_bytes:
            limit = min(limit, self._max_total_bytes // (len(self._lines) + (owner not in self._lines)))
        if line.items and line.size_bytes + size_bytes > limit:
            raise TurnQueueFullError(f"{line.size_bytes} bytes wait, and at most {limit} may")
        line.items.append((item, size_bytes))
        line.size_bytes += size_bytes
        self._lines[owner] = line

    def put_back(self, items: Iterable[tuple[str, T, int]]) -> None:
        """Return (owner, item, size) that were taken last, in their order: they are the next ones."""
        for owner, item, size_bytes in reversed(list(items)):
            line = self._lines.setdefault(owner, _Line[T]())
            line.items.appendleft((item, size_bytes))
            line.size_bytes += size_bytes
            self._lines.move_to_end(owner, last=False)

    def take(self) -> T | None:
        """The next item, None if there is none. Its owner's next turn is after all others'."""
        if not self._lines:
            return None
        owner, line = next(iter(self._lines.items()))
        item, size_bytes = line.items.popleft()
        line.size_bytes -= size_bytes
        if line.items:
            self._lines.move_to_end(owner)
        else:
            del self._lines[owner]
        return item

    def remove(self, owner: str, item: T) -> None:
        """Take out an item that nobody waits for any more; nothing happens if it is not there."""
        line = self._lines.get(owner)
        found = None if line is None else next((one for one in line.items if one[0] is item), None)
        if line is None or found is None:
            return
        line.items.remove(found)
        line.size_bytes -= found[1]
        if not line.items:
            del self._lines[owner]
