"""HttpCounts: how many HTTP requests each route has answered, and how long that took; and numbers of others.

The processes of a group count in one piece of memory, each in a place of its own, so that any of them tells
the same sums, and a lost one's are kept for the process in its place.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0)
STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")
_NUM_BUCKETS = len(BOUNDS_S) + 1
_ROUTE_NUMBERS = len(STATUSES) + _NUM_BUCKETS + 1  # the last is the sum of times, in nanoseconds
_PLACE_BYTES = 2**16
_NUM_MORE = 64  # at the end of a place: not of routes
_MAX_ROUTES = (_PLACE_BYTES // 8 - _NUM_MORE) // _ROUTE_NUMBERS
OTHER = "none"  # what is no route, as prometheus_fastapi_instrumentator calls it


class RouteCounts(NamedTuple):
    """Of one route. by_status: of STATUSES; buckets: of BOUNDS_S and what is slower."""

    method: str
    path: str
    by_status: list[int]
    buckets: list[int]
    sum_s: float


class HttpCounts:
    """Counts by route. `routes` are equal in all processes of a group."""

    def __init__(self, routes: Iterable[tuple[str, str]], fd: int | None = None, place: int = 0) -> None:
        """routes: (method, path). fd: of `make_counts_memory`, where this process counts at `place`."""
        self._routes = [*sorted(set(routes)), (OTHER, OTHER)]
        assert len(self._routes) <= _MAX_ROUTES
        self._memory = mmap.mmap(-1, _PLACE_BYTES) if fd is None else mmap.mmap(fd, 0)
        self._numbers = memoryview(self._memory).cast("Q")
        self._num_places = len(self._memory) // _PLACE_BYTES
        begin = place * _PLACE_BYTES // 8
        self._places = {route: begin + index * _ROUTE_NUMBERS for index, route in enumerate(self._routes)}
        self._other = self._places[OTHER, OTHER]
        end = begin + _PLACE_BYTES // 8
        self.more = self._numbers[end - _NUM_MORE : end]  # this process's, for others to count in

    def note(self, method: str, path: str, status: int, took_s: float) -> None:
        """A request was answered. `path`: a route's, or anything."""
        at = self._places.get((method, path), self._other)
        numbers = self._numbers
        numbers[at + status // 100 - 1] += 1
        numbers[at + len(STATUSES) + bisect_left(BOUNDS_S, took_s)] += 1
        numbers[at + _ROUTE_NUMBERS - 1] += int(took_s * 1e9)

    def read(self) -> list[RouteCounts]:
        """Of the routes that have been asked for, over all processes."""
        routes: list[RouteCounts] = []
        for index, (method, path) in enumerate(self._routes):
            sums = [0] * _ROUTE_NUMBERS
            for place in range(self._num_places):
                begin = place * _PLACE_BYTES // 8 + index * _ROUTE_NUMBERS
                numbers = self._numbers[begin : begin + _ROUTE_NUMBERS]
                sums = [total + number for total, number in zip(sums, numbers, strict=True)]
            by_status, buckets = sums[: len(STATUSES)], sums[len(STATUSES) : -1]
            if any(by_status):
                routes.append(RouteCounts(method, path, by_status, buckets, sums[-1] / 1e9))
        return routes

    def read_more(self) -> list[int]:
        """The sums of `more` over all processes."""
        ends = [(place + 1) * _PLACE_BYTES // 8 for place in range(self._num_places)]
        return [
            sum(numbers)
            for numbers in zip(*(self._numbers[end - _NUM_MORE : end] for end in ends), strict=True)
        ]


def make_counts_memory(num_places: int) -> int:
    """A descriptor of memory for so many processes, all zeros; it is closed by the caller."""
    fd = os.memfd_create("quire-http-counts")
    os.ftruncate(fd, num_places * _PLACE_BYTES)
    return fd
