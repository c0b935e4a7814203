"""RequestQueue: waiting requests in the order of `Request.order`, for fcfs and priority alike.

A heap, so that a preempted request finds its old place and an urgent one passes; nothing walks the queue.
Removal is lazy: a finished request stays until it surfaces or until half of the heap is such leftovers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from .request import QueueOrder, Request, RequestStatus


class WaitingRequests(Protocol):
    """What the scheduler asks of a queue; RequestQueue says what each does, FairQueue is the other one."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def add(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def first(self, count: int) -> list[Request]: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def clear(self) -> None: ...


class RequestQueue:
    """Waiting and preempted requests. `add` and `pop` O(log n), `peek` and `remove` O(1) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[QueueOrder, Request]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in no particular order; O(n), for checks only."""
        return (request for _, request in self._heap if request.status is not RequestStatus.FINISHED)

    def add(self, request: Request) -> None:
        """Put a waiting or preempted request at its place."""
        heapq.heappush(self._heap, (request.order, request))
        self._num_live += 1

    def clear(self) -> None:
        """Let go of every request."""
        self._heap = []
        self._num_live = 0

    def peek(self) -> Request | None:
        """The request that is next, None when nothing waits."""
        heap = self._heap
        while heap and heap[0][1].status is RequestStatus.FINISHED:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def first(self, count: int) -> list[Request]:
        """The next `count` requests in order. Walks the heap from its root: the rest costs nothing."""
        heap = self._heap
        frontier = [(heap[0][0], 0)] if heap else []
        found: list[Request] = []
        while frontier and len(found) < count:
            _, place = heapq.heappop(frontier)
            if heap[place][1].status is not RequestStatus.FINISHED:
                found.append(heap[place][1])
            for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heapq.heappush(frontier, (heap[child][0], child))
        return found

    def pop(self) -> Request:
        """Take the next request; raises IndexError when nothing waits."""
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty request queue")
        heapq.heappop(self._heap)
        self._num_live -= 1
        return request

    def remove(self, request: Request) -> None:
        """Forget a request that is in the queue and has just been marked FINISHED."""
        assert request.status is RequestStatus.FINISHED
        self._num_live -= 1
        # Leftovers hold prompts in memory; sweeping at half keeps the cost of a removal constant.
        if len(self._heap) > 2 * self._num_live + 64:
            self._heap = [entry for entry in self._heap if entry[1].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
