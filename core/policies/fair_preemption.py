"""FairPreemption: which running requests are preempted, so that rows and blocks are shared by weight.

A tenant's share is the larger of its fractions of all rows and of all blocks, over its weight (dominant
resource fairness, Ghodsi et al., NSDI 2011). For a waiting request the most recent requests of tenants with
greater shares are preempted, if that makes enough room, and only from tenants that were served no less than
the newcomer's and that keep at least the share which the newcomer's tenant then has. So each exchange evens
the shares out, and none is reversed until requests grow or end. A block that several requests share counts
for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..kv.kv_cache_manager import PrefixHit
from ..scheduling.request import Request
from ..scheduling.running_batch import RunningBatch
from .fair_accounts import Account, FairQueue, account_of


class Holdings:
    """The rows and blocks that each tenant would hold after the preemptions and admissions decided so far."""

    def __init__(self, accounts: Iterable[Account], batch: RunningBatch) -> None:
        self._rows = {account: account.num_rows for account in accounts}
        self._blocks = {account: account.num_blocks for account in self._rows}
        self._num_rows = batch.config.max_num_seqs
        self._num_blocks = max(1, batch.manager.pool.num_blocks)  # a model without KV has none
        self._running = batch.requests
        self._requests: dict[Account, list[Request]] = {}  # in order; made on first use

    def share(self, account: Account, rows: int = 0, blocks: int = 0) -> float:
        """The tenant's dominant share over its weight, if it held `rows` and `blocks` more."""
        row_share = (self._rows.get(account, 0) + rows) / self._num_rows
        block_share = (self._blocks.get(account, 0) + blocks) / self._num_blocks
        return max(row_share, block_share) / account.weight

    def give(self, account: Account, rows: int, blocks: int) -> None:
        """Add to a tenant's rows and blocks; negative numbers subtract."""
        self._rows[account] = self._rows.get(account, 0) + rows
        self._blocks[account] = self._blocks.get(account, 0) + blocks

    def find_last_of_greatest(self) -> Request:
        """The most recent running request of the tenant with the greatest share."""
        return self._list_requests(self.find_greatest())[-1]

    def find_greatest(self) -> Account:
        """The tenant with the greatest share."""
        return max(self._rows, key=self.share)

    def take_excess(self, floor: float, min_counter: float) -> Request | None:
        """Take the most recent request of the tenant with the greatest share that keeps `floor` without it.

        Only tenants with counters of at least `min_counter` count. None, with nothing taken, without one.
        """
        best: tuple[float, Request] | None = None
        for account in self._rows:
            share = self.share(account)
            if share <= floor or account.counter < min_counter or (best is not None and share <= best[0]):
                continue
            requests = self._list_requests(account)
            if not requests:
                continue
            last = requests[-1]
            if self.share(account, -1, -last.num_blocks) >= floor:
                best = share, last
        if best is None:
            return None
        request = self._list_requests(account_of(best[1])).pop()
        self.give(account_of(request), -1, -request.num_blocks)
        return request

    def _list_requests(self, account: Account) -> list[Request]:
        if not self._requests:
            for request in self._running:
                self._requests.setdefault(account_of(request), []).append(request)
        return self._requests.get(account, [])


class PlannedAdmissions:
    """Waiting requests for which there is room in the step that is being formed."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.requests: list[Request] = []
        self.num_rows = 0
        self.num_blocks = 0
        self.num_tokens = 0
        self._charged: dict[Account, tuple[float, bool]] = {}  # counter and is_served before the first charge

    def add(self, request: Request, num_blocks: int, num_tokens: int) -> None:
        """Add a request that takes `num_blocks` blocks, and `num_tokens` tokens in this step."""
        self.requests.append(request)
        self.num_rows += 1
        self.num_blocks += num_blocks
        self.num_tokens += num_tokens
        account = account_of(request)
        self.holdings.give(account, 1, num_blocks)
        self._charged.setdefault(account, (account.counter, account.is_served))
        account.charge(num_tokens)

    def take_back_charges(self) -> None:
        """Restore the accounts."""
        for account, before in self._charged.items():
            account.counter, account.is_served = before


class FairPreemption:
    """Chooses victims; each is preempted before the next one is drawn."""

    def __init__(self, batch: RunningBatch, holders: Mapping[Account, None]) -> None:
        """`holders`: the tenants of running requests, which the policy keeps up to date."""
        self._batch = batch
        self._holders = holders

    def choose_victims(self, waiting: FairQueue) -> Iterator[Request]:
        """Victims for running requests first, then for waiting ones."""
        yield from self._choose_for_decodes()
        yield from self._choose_for_underserved(waiting)

    def _choose_for_decodes(self) -> Iterator[Request]:
        """Victims so that each running request gets the block that its next token may need."""
        batch, pool = self._batch, self._batch.manager.pool
        num_groups = batch.manager.num_groups
        while pool.num_free < len(batch.requests) * num_groups and self._count_growth() > pool.num_free:
            yield Holdings(self._holders, batch).find_last_of_greatest()

    def _count_growth(self) -> int:
        """Blocks for running requests whose last one is full and that do not wait for their last token."""
        count_growth = self._batch.manager.count_growth
        return sum(
            max(0, count_growth(request))
            for request in self._batch.requests
            if request.num_slots == request.num_computed_tokens < request.max_total_tokens - 1
        )

    def _choose_for_underserved(self, waiting: FairQueue) -> Iterator[Request]:
        """Victims for waiting requests that lack a row or blocks and whose tenants hold less than others.

        For as many as can begin in this step. They are admitted later in it, after the decodes. Meanwhile
        they are charged what they will cost then, so that the queue's order is the one of the admissions.
        """
        batch = self._batch
        head = waiting.peek()
        if head is None or not self._has_others(head, waiting) or not batch.lacks_room(head):
            return
        planned = PlannedAdmissions(Holdings(self._holders, batch))
        while head is not None:
            hit = batch.manager.find_prefix(head)
            num_tokens = self._count_first_tokens(head, hit, planned.num_tokens)
            num_blocks = batch.manager.count_taken(head, hit)
            victims = self._find_victims(head, hit, num_blocks, planned) if num_tokens else None
            if victims is not None:
                waiting.remove(head)  # before a charge or a victim changes who is next
                yield from victims
                planned.add(head, num_blocks, num_tokens)
            elif not num_tokens or not self._pass_over(head, waiting, planned):
                break
            head = waiting.peek()
        waiting.put_back()
        planned.take_back_charges()
        for request in planned.requests:
            waiting.add(request)

    def _pass_over(self, head: Request, waiting: FairQueue, planned: PlannedAdmissions) -> bool:
        """Whether to look behind a request whose tenant holds most: it could make room for others."""
        if account_of(head) is not planned.holdings.find_greatest():
            return False
        return waiting.pass_over(head, self._batch.config.max_num_seqs)

    def _has_others(self, head: Request, waiting: FairQueue) -> bool:
        """Whether another tenant has a row, or one of several waiting tenants could give one to another."""
        num_used = self._batch.num_used_rows
        return account_of(head).num_rows < num_used or (num_used > 0 and waiting.num_tenants > 1)

    def _find_victims(
        self, head: Request, hit: PrefixHit, num_blocks: int, planned: PlannedAdmissions
    ) -> list[Request] | None:
        """The victims that give `head` the rows and the `num_blocks` that it needs beside `planned`.

        None if there are not enough, or its tenant would then have more than others keep.
        """
        batch, account, num_planned = self._batch, account_of(head), planned.num_rows
        wanted, num_groups = hit.block_ids, batch.manager.num_groups
        lacking_rows = num_planned + 1 - len(batch.free_rows)
        lacking_blocks = (
            planned.num_blocks
            + num_blocks
            + batch.num_reserved_blocks
            + num_planned * num_groups
            - batch.manager.pool.num_free
        )
        floor = planned.holdings.share(account, 1, num_blocks)
        victims: list[Request] = []
        while lacking_rows > 0 or lacking_blocks > 0:
            victim = planned.holdings.take_excess(floor, account.counter)
            if victim is None:
                return None
            victims.append(victim)
            lacking_rows -= 1
            # Its part of the reserved blocks comes free as well.
            lacking_blocks -= num_groups + batch.manager.count_freed(victim, wanted)
        return victims

    def _count_first_tokens(self, head: Request, hit: PrefixHit, num_planned: int) -> int:
        """Tokens of `head` that fit into this step beside decodes and `num_planned` planned tokens."""
        if head.num_placeholders:
            return 0
        batch = self._batch
        num_left = batch.max_step_tokens - batch.num_used_rows - num_planned
        num_missing = head.num_tokens - hit.num_tokens
        if not batch.config.enable_chunked_prefill and num_missing > num_left:
            return 0
        return max(0, min(num_missing, num_left))
