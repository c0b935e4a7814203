"""FairQueue: waiting requests of many tenants; next is the first in order of the tenant that is next by key.

A RequestQueue a tenant and a heap over the tenants that have one: neither the number of requests nor that of
tenants that wait costs a step anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .request import Request
from .request_queue import RequestQueue
from .tenant import Tenant, TenantHeap


class FairQueue:
    """Waiting and preempted requests, as RequestQueue has them."""

    def __init__(self) -> None:
        self._queues: dict[Tenant, RequestQueue] = {}  # none is empty
        self._tenants = TenantHeap(lambda tenant: tenant in self._queues)
        self._aside: dict[Tenant, RequestQueue] = {}
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in no particular order; O(n), for checks only."""
        return (request for queue in self._queues.values() for request in queue)

    def add(self, request: Request) -> None:
        """Put a waiting or preempted request at its place among those of its tenant."""
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = RequestQueue()
        self._tenants.add(request.tenant)
        queue.add(request)
        self._num_live += 1

    def clear(self) -> None:
        """Let go of every request."""
        self._queues.clear()
        self._num_live = 0

    def peek(self) -> Request | None:
        """The request that is next, None when nothing waits."""
        tenant = self._tenants.find_least()
        return None if tenant is None else self._queues[tenant].peek()

    def first_of(self, tenant: Tenant) -> Request | None:
        """The request that is next of this tenant's."""
        queue = self._queues.get(tenant)
        return None if queue is None else queue.peek()

    def set_aside(self, tenant: Tenant) -> None:
        """Pass over a tenant that has requests here until `put_back`. None is added or removed meanwhile."""
        self._aside[tenant] = self._queues.pop(tenant)

    def list_set_aside(self) -> list[Request]:
        """The first request of each tenant that is passed over."""
        return [request for queue in self._aside.values() if (request := queue.peek()) is not None]

    def put_back(self) -> None:
        """End what `set_aside` began."""
        self._queues |= self._aside
        for tenant in self._aside:
            self._tenants.add(tenant)
        self._aside.clear()

    def first(self, count: int) -> list[Request]:
        """The next `count` requests, if no tenant is charged in between; for people. O(number of tenants)."""
        tenants = heapq.nsmallest(count, self._queues, key=lambda tenant: tenant.key)
        found: list[Request] = []
        for tenant in tenants:
            found += self._queues[tenant].first(count - len(found))
            if len(found) >= count:
                break
        return found

    def pop(self) -> Request:
        """Take the next request; raises IndexError when nothing waits."""
        tenant = self._tenants.find_least()
        if tenant is None:
            raise IndexError("pop from an empty request queue")
        request = self._queues[tenant].pop()
        self._count_out(tenant)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request that is in the queue and has just been marked FINISHED."""
        self._queues[request.tenant].remove(request)
        self._count_out(request.tenant)

    def _count_out(self, tenant: Tenant) -> None:
        self._num_live -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]
