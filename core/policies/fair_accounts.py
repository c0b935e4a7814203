"""Accounts: how many tokens each tenant has been served, over its weight. The fair policy orders by them.

A virtual counter a tenant (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), charged
each token over the tenant's weight. A tenant that becomes active starts at the least counter of the active
ones, so that none saves up service while idle; one that leaves keeps its counter until the others have caught
up, so that none gets rid of it by leaving. An engine without requests forgets all counters.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ..scheduling.request import Request
from ..scheduling.request_queue import RequestQueue
from ..scheduling.tenant import Tenant, TenantName

_MAX_PASSED_OVER = 8  # tenants in a step whose next request does not fit; bounds the search for one that does

AccountKey = tuple[float, bool, int]


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's account. `key` only grows, unless a charge is taken back."""

    name: TenantName
    number: int  # which activation it began with
    weight: float
    counter: float  # tokens served over weight, plus its start
    is_served: bool = False
    num_live: int = 0  # requests that wait or run
    num_rows: int = 0  # of requests that run
    # Rows and prompts of the last steps, in rows: their maximum, fading, as short requests come and go.
    recent_load: float = 0.0
    num_blocks: int = 0  # of requests that run; a shared block counts for each

    @property
    def key(self) -> AccountKey:
        """The order of tenants: by counter, then newcomers first, then by activation."""
        return self.counter, self.is_served, self.number

    @property
    def share(self) -> float:
        """Rows over weight, including the last steps' rows and prompts."""
        return max(self.num_rows, self.recent_load) / self.weight

    def charge(self, num_tokens: float) -> None:
        """Count tokens as served."""
        self.counter += num_tokens / self.weight
        self.is_served = True


@dataclass(slots=True, eq=False)
class FairRecord:
    """What the fair policy knows of one request."""

    account: Account
    num_overtaken: int = 0  # requests behind it that were admitted while it was next and did not fit
    num_charged_tokens: int = 0  # its first tokens that were charged, or were cached
    last_decode_step: int = 0  # the last step that limited its tenant's decodes and had this one


def record_of(request: Request) -> FairRecord:
    """The policy's record of a live request."""
    return request.policy_data


def account_of(request: Request) -> Account:
    """The account of a live request's tenant."""
    return record_of(request).account


class AccountHeap:
    """Accounts by key. An entry's key may lag behind its account's, and is corrected when it surfaces.

    An account that does not satisfy `belongs` any more is dropped when it surfaces.
    """

    def __init__(self, belongs: Callable[[Account], bool]) -> None:
        self._belongs = belongs
        self._heap: list[tuple[AccountKey, Account]] = []
        self._keys: dict[Account, AccountKey] = {}  # of each account's valid entry

    def add(self, account: Account) -> None:
        """Add an account, or update one whose key has fallen."""
        if account not in self._keys or account.key < self._keys[account]:
            self._keys[account] = account.key
            heapq.heappush(self._heap, (account.key, account))

    def find_least(self) -> Account | None:
        """The first account by key, None if there is none. O(log n) for each one charged meanwhile."""
        heap = self._heap
        while heap:
            key, account = heap[0]
            if self._keys.get(account) != key:
                heapq.heappop(heap)
            elif not self._belongs(account):
                heapq.heappop(heap)
                del self._keys[account]
            elif key != account.key:
                self._keys[account] = account.key
                heapq.heapreplace(heap, (account.key, account))
            else:
                return account
        return None

    def remove_least(self) -> None:
        """Remove what `find_least` has just returned."""
        _, account = heapq.heappop(self._heap)
        del self._keys[account]


class Accounts:
    """The accounts of tenants with live requests, and of tenants that were served more than these."""

    def __init__(self) -> None:
        self._accounts: dict[TenantName, Account] = {}
        self._num_activations = 0
        self._num_active = 0
        self._active = AccountHeap(lambda account: account.num_live > 0)
        self._idle = AccountHeap(self._is_idle)

    def enter(self, tenant: Tenant) -> Account:
        """A request of this tenant has come."""
        account = self._accounts.get(tenant.name)
        if account is None or account.num_live == 0:
            account = self._activate(tenant)
        account.num_live += 1
        return account

    def leave(self, account: Account) -> None:
        """A request of this tenant has ended."""
        account.num_live -= 1
        if account.num_live:
            return
        self._num_active -= 1
        self._idle.add(account)
        if not self._num_active:
            self._accounts.clear()

    def catch_up(self, held: Collection[Account]) -> None:
        """Raise the counters of `held`, which could not use their part, to the least of all others."""
        passed: list[Account] = []
        least = self._active.find_least()
        while least is not None and least in held:
            self._active.remove_least()
            passed.append(least)
            least = self._active.find_least()
        for account in passed:
            if least is not None:
                account.counter = max(account.counter, least.counter)
            self._active.add(account)

    def check(self, live: Iterable[Request]) -> list[str]:
        """The problems found, given the live requests."""
        num_live = Counter(map(account_of, live))
        active = {account: account.num_live for account in self._accounts.values() if account.num_live}
        if active != num_live or len(active) != self._num_active:
            return [f"accounts count {sum(active.values())} live requests, {num_live.total()} are"]
        return []

    def _activate(self, tenant: Tenant) -> Account:
        least = self._active.find_least()
        level = 0.0 if least is None else least.counter
        while (idle := self._idle.find_least()) is not None and idle.counter <= level:
            del self._accounts[idle.name]  # the others have caught up with it
        account = self._accounts.get(tenant.name)
        if account is None:
            self._num_activations += 1
            account = Account(tenant.name, self._num_activations, tenant.weight, level)
            self._accounts[tenant.name] = account
        account.weight = tenant.weight
        self._num_active += 1
        self._active.add(account)
        return account

    def _is_idle(self, account: Account) -> bool:
        return account.num_live == 0 and self._accounts.get(account.name) is account


class FairQueue:
    """A RequestQueue a tenant, and a heap of the tenants that have one.

    The next request is the first one of the tenant with the least key. A step's cost grows neither with the
    waiting requests nor with their tenants.
    """

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
        """Put a waiting or preempted request in its place among those of its tenant."""
        account = account_of(request)
        self._num_waiting += 1
        if account in self._aside:
            self._aside[account].add(request)
            return
        if account not in self._queues:
            self._queues[account] = RequestQueue()
        self._accounts.add(account)
        self._queues[account].add(request)

    def peek(self) -> Request | None:
        """The next request, None if nothing waits."""
        account = self._accounts.find_least()
        return None if account is None else self._queues[account].peek()

    def first_of(self, account: Account) -> Request | None:
        """The tenant's next request."""
        queue = self._queues.get(account)
        return None if queue is None else queue.peek()

    @property
    def num_tenants(self) -> int:
        """Tenants that wait and are not passed over."""
        return len(self._queues)

    def pass_over(self, head: Request, most: int) -> bool:
        """Pass over the next request, which does not fit now, and its tenant, until `put_back`.

        False if it was overtaken `most` times, or too many tenants are passed over. None of the tenant's
        requests may be removed meanwhile.
        """
        if len(self._aside) >= _MAX_PASSED_OVER or record_of(head).num_overtaken >= most:
            return False
        account = account_of(head)
        self._aside[account] = self._queues.pop(account)
        return True

    def list_set_aside(self) -> list[Request]:
        """The first request of each tenant that is passed over."""
        return [request for queue in self._aside.values() if (request := queue.peek()) is not None]

    def put_back(self) -> None:
        """Put back the tenants that were passed over."""
        self._queues |= self._aside
        for account in self._aside:
            self._accounts.add(account)
        self._aside.clear()

    def first(self, count: int) -> list[Request]:
        """The next `count` requests if no tenant is charged meanwhile, for live views. O(tenants)."""
        accounts = heapq.nsmallest(count, self._queues, key=lambda account: account.key)
        requests: list[Request] = []
        for account in accounts:
            requests += self._queues[account].first(count - len(requests))
            if len(requests) >= count:
                break
        return requests

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        account = account_of(request)
        self._queues[account].remove(request)
        self._num_waiting -= 1
        if not self._queues[account]:
            del self._queues[account]
