"""FairScheduler: the scheduler with tokens, rows and blocks shared among tenants by weight.

Tokens: requests are taken from the tenant whose counter (tenant.py) is least, within a tenant by priority
value, then arrival. Prompts of running requests and waiting requests stand in one order, and each part is
charged at once, so long prompts of one tenant do not take a step from the prompts of others. Decodes are
charged when they are scheduled; what is computed again after a preemption is not charged again.

Time: a newcomer's first token takes about as long as without the others (fair_pace.py). While newcomers come,
tenants with many more rows give way: a step with a newcomer's prompt leaves out all that is theirs, never two
such steps running, and in the others their decodes take turns. Everybody else's decodes are not delayed.

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
from collections.abc import Callable

from ..ipc.config import SchedulerConfig
from ..ipc.step import SchedulerOutput
from .fair_holdings import Holdings, Promised
from .fair_pace import Pace, is_in_excess, share_of
from .fair_queue import FairQueue
from .kv_cache_manager import KVCacheManager
from .request import QueueOrder, Request
from .scheduler import Scheduler, Step
from .stats import EngineCounters
from .tenant import Tenant, TenantKey

_MAX_PASSED_OVER = 8  # tenants in a step whose next request does not fit; bounds what a step looks at


class FairScheduler(Scheduler):
    """The policy `fair`. Differs in who is next, who is charged and who is preempted."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        counters: EngineCounters,
        monotonic: Callable[[], float],
    ) -> None:
        """`monotonic`: the clock that steps are timed by."""
        self._queue = FairQueue()
        super().__init__(config, manager, counters, self._queue)
        self._monotonic = monotonic
        self._pace = Pace(monotonic)
        self._holders: set[Tenant] = set()  # tenants of running requests
        self._prefilling: dict[Request, None] = {}  # running, with a part of the prompt to come
        self._was_exclusive = False

    # -- one step

    def next_schedule_at(self) -> float | None:
        """Shortly before the running step ends, while newcomers come beside tenants in excess."""
        if len(self.in_flight) != 1 or self._config.run_ahead == 1 or not self.in_flight[0].limited:
            return None
        return self._pace.find_submit_time(self.in_flight[0])

    def schedule(self) -> SchedulerOutput | None:
        """As Scheduler.schedule; None also before `next_schedule_at`."""
        submit_at = self.next_schedule_at()
        if submit_at is not None and self._monotonic() < submit_at:
            return None
        return super().schedule()

    def complete_step(self) -> Step:
        step = super().complete_step()
        self._pace.note_end(step)
        return step

    def _make_room(self) -> None:
        self._preempt_for_decodes()
        self._preempt_for_underserved()

    def _choose_decodes(self, step: Step) -> list[Request]:
        """All; but while newcomers come, those of tenants in excess in turns, and none where one begins.

        Not in two steps running, so that newcomers without end do not stop those decodes.
        """
        newcomer = self._find_newcomer()
        if newcomer is not None:
            self._pace.note_newcomer(newcomer)
        step.is_exclusive = newcomer is not None and not self._was_exclusive
        self._was_exclusive = step.is_exclusive
        expected = self._pace.find_newcomer()
        if expected is None:
            return self.running
        step.limited = frozenset(
            tenant for tenant in self._holders if is_in_excess(share_of(tenant), expected)
        )
        chosen: list[Request] = []
        limited: list[Request] = []
        for request in self.running:
            known = request.num_tokens + request.num_placeholders
            if request.tenant not in step.limited or known - request.num_computed_tokens != 1:
                chosen.append(request)
            elif known < request.max_total_tokens:
                limited.append(request)
        return chosen if step.is_exclusive else chosen + self._take_turns(step, limited)

    def _take_turns(self, step: Step, decodes: list[Request]) -> list[Request]:
        """Those of the tenants in excess that decode in this step; sets what is left for their prompts.

        First those whose last turn is longest ago; in the list that is returned they are last, since those
        that were in the step before come first in a step.
        """
        limit = self._pace.limit_tokens(len(decodes))
        if limit is None:
            limit = step.token_budget
        num_decodes = limit - self._count_prompt_tokens(step.limited, limit // 2)
        decodes.sort(key=lambda request: request.turn)
        taken = decodes[:num_decodes]
        for request in taken:
            request.turn = step.step_id
        step.num_limited_tokens = len(taken)
        step.limited_budget = max(1, limit - len(taken))
        taken.reverse()
        return taken

    def _count_prompt_tokens(self, tenants: frozenset[Tenant], most: int) -> int:
        """Tokens of prompts that these tenants could have computed now, up to `most`."""
        prompts = [request for request in self._prefilling if request.tenant in tenants]
        head = self.waiting.peek() if self._has_free_row else None
        if head is not None and head.tenant in tenants:
            prompts.append(head)
        return min(most, sum(request.num_tokens - request.num_computed_tokens for request in prompts))

    def _find_newcomer(self) -> Tenant | None:
        """A tenant with a prompt to compute in this step beside tenants in excess."""
        head = self.waiting.peek()
        num_others = len(self._holders) - (head is None or head.tenant in self._holders)
        if num_others <= 0:
            return None  # nobody to be beside: the usual case
        greatest = max(map(share_of, self._holders))
        for tenant in dict.fromkeys(request.tenant for request in self._prefilling):
            if is_in_excess(greatest, tenant):
                return tenant
        if head is not None and is_in_excess(greatest, head.tenant) and self._can_begin(head):
            return head.tenant
        return None

    def _can_begin(self, head: Request) -> bool:
        return self._has_free_row and not head.num_placeholders and not self._lacks_room(head)

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
            head = self.waiting.peek() if may_admit and self._has_free_row else None
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

    @property
    def _has_free_row(self) -> bool:
        """No more rows than a step has tokens: decodes that were left out come back all at once."""
        return bool(self._free_rows) and len(self.running) < self._max_step_tokens

    def _size_chunk(self, step: Step, request: Request, num_missing: int) -> int:
        num_tokens = super()._size_chunk(step, request, num_missing)
        if request.tenant not in step.limited:
            return num_tokens
        if not self._config.enable_chunked_prefill:
            return num_tokens if step.limited_budget > 0 else 0
        return min(num_tokens, step.limited_budget)

    def _add_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        super()._add_chunk(step, request, num_tokens)
        _charge(request)
        if request.num_computed_tokens < request.num_tokens:
            self._prefilling[request] = None
        else:
            self._prefilling.pop(request, None)
        if request.tenant in step.limited:
            step.limited_budget = max(0, step.limited_budget - num_tokens)
            step.num_limited_tokens += num_tokens

    def _enter(self, step: Step, request: Request) -> None:
        super()._enter(step, request)
        self._holders.add(request.tenant)
        for passed in self._queue.list_set_aside():
            passed.num_overtaken += 1
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)
        request.turn = step.step_id

    def _launch(self, step: Step) -> SchedulerOutput:
        for request in step.requests:  # not by _charge: a call each is 0.04 ms at 256 rows
            num_new = request.num_computed_tokens - request.num_charged_tokens
            if num_new > 0:
                tenant = request.tenant
                tenant.counter += num_new / tenant.weight
                tenant.is_served = True
                request.num_charged_tokens = request.num_computed_tokens
        self._pace.note_launch(step)
        return super()._launch(step)

    def _release(self, request: Request) -> None:
        super()._release(request)
        self._prefilling.pop(request, None)
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
        promised = Promised(self._measure_holdings())
        while head is not None and self._displace_for(head, promised):
            head = self.waiting.peek()
        promised.take_back_charges()
        for request in promised.requests:
            self.waiting.add(request)

    def _displace_for(self, head: Request, promised: Promised) -> bool:
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
        num_left = self._max_step_tokens - len(self.running) - num_promised
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


def _charge(request: Request) -> None:
    """Charge the request's tenant what was computed of it and was not charged before."""
    num_new = request.num_computed_tokens - request.num_charged_tokens
    if num_new > 0:
        request.tenant.charge(num_new)
        request.num_charged_tokens = request.num_computed_tokens
