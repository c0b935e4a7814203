"""What tenants hold of rows and blocks, and what was promised to them, while it is decided who is preempted.

It changes nothing but a tenant's account, and that only until `Promised.take_back_charges`.
"""

from __future__ import annotations

from collections.abc import Iterable

from .request import Request
from .tenant import Tenant


class Holdings:
    """What tenants hold of rows and blocks while it is decided whose requests are preempted."""

    def __init__(
        self, tenants: Iterable[Tenant], running: list[Request], num_rows: int, num_blocks: int
    ) -> None:
        self._rows = {tenant: tenant.num_rows for tenant in tenants}
        self._blocks = {tenant: tenant.num_blocks for tenant in self._rows}
        self._num_rows = num_rows
        self._num_blocks = num_blocks
        self._running = running
        self._requests: dict[Tenant, list[Request]] = {}  # in order; made when one is looked for

    def share(self, tenant: Tenant, rows: int = 0, blocks: int = 0) -> float:
        """The tenant's dominant share over its weight if it held so much more."""
        row_share = (self._rows.get(tenant, 0) + rows) / self._num_rows
        block_share = (self._blocks.get(tenant, 0) + blocks) / self._num_blocks
        return max(row_share, block_share) / tenant.weight

    def give(self, tenant: Tenant, rows: int, blocks: int) -> None:
        """Count more, or less with negative numbers, for a tenant."""
        self._rows[tenant] = self._rows.get(tenant, 0) + rows
        self._blocks[tenant] = self._blocks.get(tenant, 0) + blocks

    def find_last_of_greatest(self) -> Request:
        """The most recent running request of the tenant with the greatest share."""
        return self._list_requests(max(self._rows, key=self.share))[-1]

    def take_excess(self, floor: float, min_counter: float) -> Request | None:
        """Take the most recent request of the tenant with the greatest share that keeps `floor` without it.

        Only of tenants whose counters are at least `min_counter`. None, and nothing taken, if there is none.
        """
        found: tuple[float, Request] | None = None
        for tenant in self._rows:
            share = self.share(tenant)
            if share <= floor or tenant.counter < min_counter or (found is not None and share <= found[0]):
                continue
            requests = self._list_requests(tenant)
            if requests and self.share(tenant, -1, -len(requests[-1].block_ids)) >= floor:
                found = share, requests[-1]
        if found is None:
            return None
        request = self._list_requests(found[1].tenant).pop()
        self.give(request.tenant, -1, -len(request.block_ids))
        return request

    def _list_requests(self, tenant: Tenant) -> list[Request]:
        if not self._requests:
            for request in self._running:
                self._requests.setdefault(request.tenant, []).append(request)
        return self._requests.get(tenant, [])


class Promised:
    """Waiting requests for which there is room in the step that is being put together."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.requests: list[Request] = []
        self.num_blocks = 0
        self.num_tokens = 0
        self._accounts: dict[Tenant, tuple[float, bool]] = {}  # before the first charge

    def add(self, request: Request, num_blocks: int, num_tokens: int) -> None:
        """Count one more, which takes so many blocks, and so many tokens in this step."""
        self.requests.append(request)
        self.num_blocks += num_blocks
        self.num_tokens += num_tokens
        tenant = request.tenant
        self.holdings.give(tenant, 1, num_blocks)
        self._accounts.setdefault(tenant, (tenant.counter, tenant.is_served))
        tenant.charge(num_tokens)

    def take_back_charges(self) -> None:
        """Leave the tenants' accounts as they were."""
        for tenant, account in self._accounts.items():
            tenant.counter, tenant.is_served = account
