"""Tenants: who has been served how many tokens, by weight. The accounts that the fair policy orders by.

A virtual counter a tenant, as in the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): a tenant is charged each token that is computed for it, divided by its weight. One that
becomes active starts at the least counter of the active ones, so that nobody saves up service while idle;
one that leaves keeps what it was served beyond the others until they have caught up, so that nobody gets rid
of it by leaving. An engine without requests owes nobody: all counters are forgotten.

It knows counters; not requests, rows or blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

TenantKey = tuple[float, bool, int]
TenantName = str | bytes  # as the client says, or the client itself: text and bytes are never equal


@dataclass(slots=True, eq=False)
class Tenant:
    """One account. `key` grows; it falls only when a charge is taken back."""

    name: TenantName
    number: int  # of its activation
    weight: float
    counter: float  # tokens served / weight, from where it started
    is_served: bool = False
    num_live: int = 0  # requests that wait or run
    num_rows: int = 0  # of them, those that run
    num_blocks: int = 0  # that those hold, a shared one counted for each
    held_bytes: int = 0  # the price of all its live requests

    @property
    def key(self) -> TenantKey:
        """Who is next: the least counter; at the same one newcomers first, then by activation."""
        return self.counter, self.is_served, self.number

    def charge(self, num_tokens: int) -> None:
        """Count tokens as served."""
        self.counter += num_tokens / self.weight
        self.is_served = True


class TenantHeap:
    """Tenants by key. An entry's key may lag behind its tenant's, and is put right when it surfaces.

    `belongs` says which tenants are still meant to be here; the others leave when they surface.
    """

    def __init__(self, belongs: Callable[[Tenant], bool]) -> None:
        self._belongs = belongs
        self._heap: list[tuple[TenantKey, Tenant]] = []
        self._keys: dict[Tenant, TenantKey] = {}  # of each tenant's one entry that counts

    def add(self, tenant: Tenant) -> None:
        """Enter a tenant, or one that is in here already and whose key has fallen."""
        if tenant not in self._keys or tenant.key < self._keys[tenant]:
            self._keys[tenant] = tenant.key
            heapq.heappush(self._heap, (tenant.key, tenant))

    def find_least(self) -> Tenant | None:
        """The first by key, None if there is none. O(log n) for each tenant that was charged meanwhile."""
        heap = self._heap
        while heap:
            key, tenant = heap[0]
            if self._keys.get(tenant) != key:
                heapq.heappop(heap)
            elif not self._belongs(tenant):
                heapq.heappop(heap)
                del self._keys[tenant]
            elif key != tenant.key:
                self._keys[tenant] = tenant.key
                heapq.heapreplace(heap, (tenant.key, tenant))
            else:
                return tenant
        return None


class TenantLedger:
    """All accounts: those of tenants with live requests, and of those that were served beyond them."""

    def __init__(self) -> None:
        self._tenants: dict[TenantName, Tenant] = {}
        self._num_activations = 0
        self.active_weight = 0.0  # the sum over tenants with live requests
        self.held_bytes = 0  # likewise
        self._num_active = 0
        self._active = TenantHeap(lambda tenant: tenant.num_live > 0)
        self._idle = TenantHeap(self._is_idle)

    def __len__(self) -> int:
        return len(self._tenants)

    def enter(self, name: TenantName, weight: float, held_bytes: int = 0) -> Tenant:
        """A request of this tenant comes in. The weight counts if the tenant becomes active with it."""
        tenant = self._tenants.get(name)
        if tenant is None or tenant.num_live == 0:
            tenant = self._activate(name, weight)
        tenant.num_live += 1
        tenant.held_bytes += held_bytes
        self.held_bytes += held_bytes
        return tenant

    def leave(self, tenant: Tenant, held_bytes: int = 0) -> None:
        """A request of this tenant has ended, that came in with the same price."""
        tenant.num_live -= 1
        tenant.held_bytes -= held_bytes
        self.held_bytes -= held_bytes
        if tenant.num_live:
            return
        self.active_weight -= tenant.weight
        self._num_active -= 1
        self._idle.add(tenant)
        if not self._num_active:
            self._tenants.clear()
            self.active_weight = 0.0

    def check(self, num_live: dict[Tenant, int]) -> list[str]:
        """What is wrong, given how many live requests each tenant has; empty if nothing is."""
        active = {tenant: tenant.num_live for tenant in self._tenants.values() if tenant.num_live}
        if active != num_live or len(active) != self._num_active:
            return [f"tenants count {sum(active.values())} live requests, {sum(num_live.values())} are"]
        if self.held_bytes != sum(tenant.held_bytes for tenant in active):
            return [f"{self.held_bytes} bytes are counted as held, and not those of the tenants"]
        return []

    def _activate(self, name: TenantName, weight: float) -> Tenant:
        least = self._active.find_least()
        level = 0.0 if least is None else least.counter
        while (idle := self._idle.find_least()) is not None and idle.counter <= level:
            del self._tenants[idle.name]  # the others have caught up with it
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_activations += 1
            tenant = Tenant(name, self._num_activations, weight, level)
            self._tenants[name] = tenant
        tenant.weight = weight
        self.active_weight += weight
        self._num_active += 1
        self._active.add(tenant)
        return tenant

    def _is_idle(self, tenant: Tenant) -> bool:
        return tenant.num_live == 0 and self._tenants.get(tenant.name) is tenant
