"""Tenants: whom requests are for, with their weights. What one has been served is the scheduling policy's."""

from __future__ import annotations

from dataclasses import dataclass

TenantName = str | bytes  # as the client says, or the client itself: text and bytes are never equal


@dataclass(frozen=True, slots=True)
class ClientShare:
    """How a client's requests count. `tenant`: whose all of them are; None: each is whose it says.

    `is_bounded`: also of requests that it had before no more than twice the bounds are taken.
    """

    weight: float = 1.0
    tenant: str | None = None
    is_bounded: bool = False


@dataclass(slots=True, eq=False)
class Tenant:
    """One with live requests."""

    name: TenantName
    weight: float
    num_live: int = 0  # requests that wait or run
    num_rows: int = 0  # of them, those that run
    held_bytes: int = 0  # the price of all its live requests
    work_clock_us: float = 0.0  # what its rows' own work took, over its weight (work_turns.py)


class TenantLedger:
    """The tenants with live requests."""

    def __init__(self) -> None:
        self._tenants: dict[TenantName, Tenant] = {}
        self.active_weight = 0.0  # the sum over them
        self.held_bytes = 0  # likewise

    def enter(self, name: TenantName, weight: float, held_bytes: int = 0) -> Tenant:
        """A request of this tenant comes in. The weight counts if it is the tenant's only one."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, weight)
            self.active_weight += weight
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
        del self._tenants[tenant.name]
        self.active_weight -= tenant.weight
        if not self._tenants:
            self.active_weight = 0.0  # without what rounding has left

    def check(self, num_live: dict[Tenant, int]) -> list[str]:
        """What is wrong, given how many live requests each tenant has; empty if nothing is."""
        counted = {tenant: tenant.num_live for tenant in self._tenants.values()}
        if counted != num_live:
            return [f"tenants count {sum(counted.values())} live requests, {sum(num_live.values())} are"]
        if self.held_bytes != sum(tenant.held_bytes for tenant in counted):
            return [f"{self.held_bytes} bytes are counted as held, and not those of the tenants"]
        return []
