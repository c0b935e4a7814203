"""RequestQueue: waiting requests in the order of `Request.order`.

A sorted list, so that a preempted request finds its old place and an urgent one passes; nothing walks it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Protocol

from .request import Request

_order = attrgetter("order")


class WaitingRequests(Protocol):
    """What the scheduler and blame ask of a queue; RequestQueue says what each does."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def first(self, count: int) -> list[Request]: ...
    def remove(self, request: Request) -> None: ...


class RequestQueue:
    """Waiting and preempted requests. `add` and `remove` compare O(log n) and move the pointers behind."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests; O(n)."""
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a waiting or preempted request at its place."""
        insort(self._requests, request, key=_order)

    def peek(self) -> Request | None:
        """The request that is next, None when nothing waits."""
        return self._requests[0] if self._requests else None

    def first(self, count: int) -> list[Request]:
        """The next `count` requests in order."""
        return self._requests[:count]

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        place = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[place] is request
        del self._requests[place]
