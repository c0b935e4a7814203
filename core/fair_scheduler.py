"""FairScheduler: the scheduler with tokens, rows and blocks shared among tenants by weight.

Tokens: requests are taken from the tenant whose counter (tenant.py) is least, within a tenant by priority
value, then arrival. Prompts of running requests and waiting requests stand in one order, and each part is
charged at once, so long prompts of one tenant do not take a step from the prompts of others. Decodes are not
delayed, and charged when they are scheduled; what is computed again after a preemption is not charged again.

A request that does not fit holds up its own tenant only, until max_num_seqs requests went before it.

Rows and blocks: a tenant's share is the larger of its fractions of all rows and of all blocks, over its
weight (dominant resource fairness, Ghodsi et al., NSDI 2011). If the next waiting request lacks a row or
blocks, the most recent requests of tenants with greater shares are preempted for it, only if that is enough,
only while such a tenant keeps at least the share that the newcomer's has with it, and only if it was served
no less. So each exchange evens the shares out, and none is turned back until requests grow or end. Blocks
that running requests lack come from the tenant with the greatest share. A block that several requests share
counts for each of them.

Preempted work is computed again, but tokens are never lost, and whoever causes a preemption decodes or begins
in that step: some request always gets on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from ..ipc.config import SchedulerConfig
from ..ipc.step import SchedulerOutput
from .fair_queue import FairQueue
from .kv_cache_manager import KVCacheManager
from .request import QueueOrder, Request
from .scheduler import Scheduler, Step
from .stats import EngineCounters
from .tenant import Tenant, TenantKey

_MAX_PASSED_OVER = 8  # tenants in a step whose next request does not fit; bounds what a step looks at


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


class FairScheduler(Scheduler):
    """The policy `fair`. Differs in who is next, who is charged and who is preempted."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, counters: EngineCounters) -> None:
        self._queue = FairQueue()
        super().__init__(config, manager, counters, self._queue)
        self._holders: set[Tenant] = set()  # tenants of running requests

    # -- one step

    def _make_room(self) -> None:
        self._preempt_for_decodes()
        self._preempt_for_underserved()

    def _schedule_prompts(self, step: Step, prefills: list[Request]) -> None:
        """Running prompts and waiting requests by the keys of their tenants, which grow with each part."""
        running: list[tuple[TenantKey, QueueOrder, Request]] = [
            (request.tenant.key, request.order, request) for request in prefills
        ]
        heapq.heapify(running)
        may_admit = True
        while step.token_budget and (running or may_admit):
            if running and running[0][0] != running[0][2].tenant.key:
                request = running[0][2]
                heapq.heapreplace(running, (request.tenant.key, request.order, request))
                continue
            head = self.waiting.peek() if may_admit and self._free_rows else None
            if running and (head is None or running[0][0] <= head.tenant.key):
                self._schedule_prefill(step, heapq.heappop(running)[2])
            else:
                may_admit = head is not None and (self._admit(step, head) or self._may_pass_over(head))
        self._queue.put_back()

    def _may_pass_over(self, head: Request) -> bool:
        """Let other tenants' requests go before one that does not fit now, if it was not passed too often."""
        passed = self._queue.list_set_aside()
        if len(passed) >= _MAX_PASSED_OVER or head.num_overtaken >= self._config.max_num_seqs:
            return False
        self._queue.set_aside(head.tenant)
        return True

    def _add_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        super()._add_chunk(step, request, num_tokens)
        _charge(request)

    def _enter(self, step: Step, request: Request) -> None:
        super()._enter(step, request)
        self._holders.add(request.tenant)
        for passed in self._queue.list_set_aside():
            passed.num_overtaken += 1
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)

    def _launch(self, step: Step) -> SchedulerOutput:
        for request in step.requests:  # not by _charge: a call each is 0.04 ms at 256 rows
            num_new = request.num_computed_tokens - request.num_charged_tokens
            if num_new > 0:
                tenant = request.tenant
                tenant.counter += num_new / tenant.weight
                tenant.is_served = True
                request.num_charged_tokens = request.num_computed_tokens
        return super()._launch(step)

    def _release(self, request: Request) -> None:
        super()._release(request)
        if request.tenant.num_rows == 0:
            self._holders.discard(request.tenant)

    # -- preemption

    def _preempt_for_decodes(self) -> None:
        """Make sure that each running request gets the block that it may need for its next token."""
        pool = self._manager.pool
        while pool.num_free < len(self.running) and self._count_growing() > pool.num_free:
            self._preempt(self._measure_holdings().find_last_of_greatest())

    def _count_growing(self) -> int:
        """Running requests whose last block is full and who do not wait for their last token."""
        block_size = self._manager.block_size
        return sum(
            len(request.block_ids) * block_size == request.num_computed_tokens < request.max_total_tokens - 1
            for request in self.running
        )

    def _preempt_for_underserved(self) -> None:
        """Make room for waiting requests that lack a row or blocks and whose tenants hold less than others.

        For as many as can begin in this step. They are admitted later in it, after the decodes, and are
        charged meanwhile what they will be charged then, so that the next one is the one that will be next.
        """
        head = self.waiting.peek()
        if head is None or head.tenant.num_rows == len(self.running) or not self._lacks_room(head):
            return
        promised = _Promised(self._measure_holdings())
        while head is not None and self._displace_for(head, promised):
            head = self.waiting.peek()
        promised.take_back_charges()
        for request in promised.requests:
            self.waiting.add(request)

    def _displace_for(self, head: Request, promised: _Promised) -> bool:
        """Preempt what `head` needs to begin in this step beside those in `promised`; move it there.

        False, with nothing changed, if that is not possible or would give its tenant more than others keep.
        """
        hits = self._manager.find_prefix(head)
        num_tokens = self._count_first_tokens(head, hits, promised.num_tokens)
        if head.num_placeholders or num_tokens == 0:
            return False
        num_taken = self._manager.count_taken(head, hits)
        num_promised = len(promised.requests)
        lacking_rows = num_promised + 1 - len(self._free_rows)
        lacking_blocks = (
            promised.num_blocks + num_taken + self._reserve + num_promised - self._manager.pool.num_free
        )
        floor = promised.holdings.share(head.tenant, 1, num_taken)
        victims: list[Request] = []
        while lacking_rows > 0 or lacking_blocks > 0:
            victim = promised.holdings.take_excess(floor, head.tenant.counter)
            if victim is None:
                return False
            victims.append(victim)
            lacking_rows -= 1
            lacking_blocks -= 1 + self._manager.count_freed(victim, hits)  # 1: its part of the reserve
        self.waiting.pop()  # before a charge or a victim changes who is next
        for victim in victims:
            self._preempt(victim)
        promised.add(head, num_taken, num_tokens)
        return True

    def _count_first_tokens(self, head: Request, hits: list[int], num_promised: int) -> int:
        """Tokens of `head` that fit into this step beside decodes and `num_promised` others, 0 if none."""
        num_left = self._config.max_num_batched_tokens - len(self.running) - num_promised
        num_missing = head.num_tokens - len(hits) * self._manager.block_size
        if not self._config.enable_chunked_prefill and num_missing > num_left:
            return 0
        return max(0, min(num_missing, num_left))

    def _lacks_room(self, head: Request) -> bool:
        if not self._free_rows:
            return True
        num_taken = self._manager.count_taken(head, self._manager.find_prefix(head))
        return num_taken + self._reserve > self._manager.pool.num_free

    def _measure_holdings(self) -> Holdings:
        num_blocks = self._manager.pool.num_blocks
        return Holdings(self._holders, self.running, self._config.max_num_seqs, num_blocks)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._put_back(request)

    # -- looking in

    def why_waiting(self, request: Request) -> str:
        """As Scheduler.why_waiting, with the tenant's part in it."""
        head = self.waiting.peek()
        if head is None or head is request:
            return self._why_head_waits(request)
        if request is not self._queue.first_of(request.tenant):
            return "behind earlier requests of its tenant"
        if request.tenant.counter > head.tenant.counter:
            return "its tenant has been served more than others"
        return f"behind a request of another tenant: {self._why_head_waits(head)}"

    def check(self) -> list[str]:
        """As Scheduler.check, and what tenants hold."""
        problems = super().check()
        rows = Counter(request.tenant for request in self.running)
        if set(rows) != self._holders or any(tenant.num_rows != count for tenant, count in rows.items()):
            problems.append("the tenants' rows are not those of the running requests")
        for tenant in rows:
            held = sum(len(request.block_ids) for request in self.running if request.tenant is tenant)
            if tenant.num_blocks != held:
                problems.append(f"tenant {tenant.name!r} counts {tenant.num_blocks} blocks, holds {held}")
        return problems


class _Promised:
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


def _charge(request: Request) -> None:
    """Charge the request's tenant what was computed of it and was not charged before."""
    num_new = request.num_computed_tokens - request.num_charged_tokens
    if num_new > 0:
        request.tenant.charge(num_new)
        request.num_charged_tokens = request.num_computed_tokens
