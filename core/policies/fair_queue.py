"""FairQueue: waiting requests of many tenants; next is the first in order of the tenant that is next by key.

A RequestQueue a tenant and a heap over the tenants that have one: neither the number of requests nor that of
tenants that wait costs a step anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from ..scheduling.request import Request
from ..scheduling.request_queue import RequestQueue
from .fair_accounts import Account, AccountHeap, account_of


class FairQueue:
    """Waiting and preempted requests, as RequestQueue has them."""

    def __init__(self) -> None:
        self._queues: dict[Account, RequestQueue] = {}  # none is empty
        self._accounts = AccountHeap(lambda account: account in self._queues)
        self._aside: dict[Account, RequestQueue] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in no particular order; O(n)."""
        return (request for queue in self._queues.values() for request in queue)

    def add(self, request: Request) -> None:
        """Put a waiting or preempted request at its place among those of its tenant."""
        account = account_of(request)
        if account not in self._queues:
            self._queues[account] = RequestQueue()
        self._accounts.add(account)
        self._queues[account].add(request)
        self._num_waiting += 1

    def peek(self) -> Request | None:
        """The request that is next, None when nothing waits."""
        account = self._accounts.find_least()
        return None if account is None else self._queues[account].peek()

    def first_of(self, account: Account) -> Request | None:
        """The request that is next of this tenant's."""
        queue = self._queues.get(account)
        return None if queue is None else queue.peek()

    def set_aside(self, account: Account) -> None:
        """Pass over a tenant that has requests here until `put_back`. None of its is added or removed."""
        self._aside[account] = self._queues.pop(account)

    def list_set_aside(self) -> list[Request]:
        """The first request of each tenant that is passed over."""
        return [request for queue in self._aside.values() if (request := queue.peek()) is not None]

    def put_back(self) -> None:
        """End what `set_aside` began."""
        self._queues |= self._aside
        for account in self._aside:
            self._accounts.add(account)
        self._aside.clear()

    def first(self, count: int) -> list[Request]:
        """The next `count` requests, if no tenant is charged in between; for people. O(number of tenants)."""
        accounts = heapq.nsmallest(count, self._queues, key=lambda account: account.key)
        found: list[Request] = []
        for account in accounts:
            found += self._queues[account].first(count - len(found))
            if len(found) >= count:
                break
        return found

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        account = account_of(request)
        self._queues[account].remove(request)
        self._num_waiting -= 1
        if not self._queues[account]:
            del self._queues[account]
