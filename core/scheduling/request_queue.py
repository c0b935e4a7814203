"""RequestQueue: waiting requests in the order of `Request.order`.

A heap, so that a preempted request finds its old place and an urgent one passes; nothing walks the queue.
Removal is lazy: a removed request's entry stays until it surfaces or until half of the heap is leftovers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from .request import QueueOrder, Request


class WaitingRequests(Protocol):
    """What the scheduler and blame ask of a queue; RequestQueue says what each does."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def first(self, count: int) -> list[Request]: ...
    def remove(self, request: Request) -> None: ...


class RequestQueue:
    """Waiting and preempted requests. `add` O(log n), `peek` and `remove` O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[QueueOrder, Request]] = []
        self._removed: set[Request] = set()  # those whose entry is still in the heap

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in no particular order; O(n)."""
        return (request for _, request in self._heap if request not in self._removed)

    def add(self, request: Request) -> None:
        """Put a waiting or preempted request at its place."""
        if request in self._removed:
            self._removed.discard(request)  # its old entry counts again
        else:
            heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The request that is next, None when nothing waits."""
        heap = self._heap
        while heap and heap[0][1] in self._removed:
            self._removed.discard(heapq.heappop(heap)[1])
        return heap[0][1] if heap else None

    def first(self, count: int) -> list[Request]:
        """The next `count` requests in order. Walks the heap from its root: the rest costs nothing."""
        heap = self._heap
        frontier = [(heap[0][0], 0)] if heap else []
        found: list[Request] = []
        while frontier and len(found) < count:
            _, place = heapq.heappop(frontier)
            if heap[place][1] not in self._removed:
                found.append(heap[place][1])
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(frontier, (heap[child][0], child))
        return found

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
            return
        self._removed.add(request)
        # Leftovers hold prompts in memory; sweeping at half keeps the cost of a removal constant.
        if len(self._heap) > 2 * len(self) + 64:
            self._heap = [entry for entry in self._heap if entry[1] not in self._removed]
            self._removed.clear()
            heapq.heapify(self._heap)
