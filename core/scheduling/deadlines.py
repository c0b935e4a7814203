"""Deadlines: live requests that end by themselves, soonest first. Times are of a monotonic clock.

A heap with lazy removal: what has ended, or has begun before its queue timeout, stays until it surfaces or
until most of the heap is such leftovers.
"""

from __future__ import annotations

import heapq

from .request import Request

_MIN_SWEEP = 64


class Deadlines:
    """`timeout_at` and `queue_timeout_at` of requests. All operations O(log n) amortised."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Request]] = []  # (at, number of arrival, of the queue, ...)
        self._sweep_at = _MIN_SWEEP

    def add(self, request: Request) -> None:
        """Watch a request that has just come in."""
        number = request.order[-1]
        if request.timeout_at is not None:
            heapq.heappush(self._heap, (request.timeout_at, number, False, request))
        if request.queue_timeout_at is not None:
            heapq.heappush(self._heap, (request.queue_timeout_at, number, True, request))
        if len(self._heap) > self._sweep_at:  # leftovers hold prompts in memory
            self._heap = [entry for entry in self._heap if _is_open(entry[3], entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))

    def next(self) -> float | None:
        """When the next request is due, None if none is."""
        heap = self._heap
        while heap and not _is_open(heap[0][3], heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> tuple[Request, bool] | None:
        """A request whose time is up, and whether it was its time in the queue; None if there is no more."""
        if not self._heap or (at := self.next()) is None or at > now:
            return None
        _, _, is_of_queue, request = heapq.heappop(self._heap)
        return request, is_of_queue


def _is_open(request: Request, is_of_queue: bool) -> bool:
    return request.finish_reason is None and not (is_of_queue and request.has_begun)
