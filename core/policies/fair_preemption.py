"""FairPreemption: which running requests give way, so that rows and blocks are shared by weight.

A tenant's share is the larger of its fractions of all rows and of all blocks, over its weight (dominant
resource fairness, Ghodsi et al., NSDI 2011). For a waiting request the most recent requests of tenants with
greater shares are preempted, only if that is enough, only while such a tenant keeps at least the share that
the newcomer's has with it, and only if it was served no less. So each exchange evens the shares out, and none
is turned back until requests grow or end. A block that several requests share counts for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..scheduling.request import Request
from ..scheduling.running_batch import RunningBatch
from .fair_accounts import Account, FairQueue, account_of


class Holdings:
    """What tenants hold of rows and blocks while it is decided whose requests are preempted."""

    def __init__(self, accounts: Iterable[Account], batch: RunningBatch) -> None:
        self._rows = {account: account.num_rows for account in accounts}
        self._blocks = {account: account.num_blocks for account in self._rows}
        self._num_rows = batch.config.max_num_seqs
        self._num_blocks = max(1, batch.manager.pool.num_blocks)  # a model without KV has none
        self._running = batch.requests
        self._requests: dict[Account, list[Request]] = {}  # in order; made when one is looked for

    def share(self, account: Account, rows: int = 0, blocks: int = 0) -> float:
        """The tenant's dominant share over its weight if it held so much more."""
        row_share = (self._rows.get(account, 0) + rows) / self._num_rows
        block_share = (self._blocks.get(account, 0) + blocks) / self._num_blocks
        return max(row_share, block_share) / account.weight

    def give(self, account: Account, rows: int, blocks: int) -> None:
        """Count more, or less with negative numbers, for a tenant."""
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

        Only of tenants whose counters are at least `min_counter`. None, and nothing taken, if there is none.
        """
        found: tuple[float, Request] | None = None
        for account in self._rows:
            share = self.share(account)
            if share <= floor or account.counter < min_counter or (found is not None and share <= found[0]):
                continue
            requests = self._list_requests(account)
            if not requests:
                continue
            last = requests[-1]
            if self.share(account, -last.num_rows, -last.num_blocks) >= floor:
                found = share, last
        if found is None:
            return None
        request = self._list_requests(account_of(found[1])).pop()
        self.give(account_of(request), -request.num_rows, -request.num_blocks)
        return request

    def _list_requests(self, account: Account) -> list[Request]:
        if not self._requests:
            for request in self._running:
                self._requests.setdefault(account_of(request), []).append(request)
        return self._requests.get(account, [])


class Promised:
    """Waiting requests for which there is room in the step that is being put together."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.requests: list[Request] = []
        self.num_rows = 0
        self.num_blocks = 0
        self.num_tokens = 0
        self._charged: dict[Account, tuple[float, bool]] = {}  # what they were before the first charge

    def add(self, request: Request, num_blocks: int, num_tokens: int) -> None:
        """Count one more, which takes so many blocks, and so many tokens in this step."""
        self.requests.append(request)
        self.num_rows += request.num_rows
        self.num_blocks += num_blocks
        self.num_tokens += num_tokens
        account = account_of(request)
        self.holdings.give(account, request.num_rows, num_blocks)
        self._charged.setdefault(account, (account.counter, account.is_served))
        account.charge(num_tokens)

    def take_back_charges(self) -> None:
        """Leave the accounts as they were."""
        for account, before in self._charged.items():
            account.counter, account.is_served = before


class FairPreemption:
    """Chooses victims; each is preempted before the next one is asked for."""

    def __init__(self, batch: RunningBatch, holders: Mapping[Account, None]) -> None:
        """`holders`: tenants of running requests, kept by the policy."""
        self._batch = batch
        self._holders = holders

    def choose_victims(self, waiting: FairQueue) -> Iterator[Request]:
        """For running requests first, then for waiting ones."""
        yield from self._choose_for_decodes()
        yield from self._choose_for_underserved(waiting)

    def _choose_for_decodes(self) -> Iterator[Request]:
        """Make sure that each running request gets the block that it may need for its next token."""
        batch, pool = self._batch, self._batch.manager.pool
        while pool.num_free < len(batch.requests) and self._count_growing() > pool.num_free:
            yield Holdings(self._holders, batch).find_last_of_greatest()

    def _count_growing(self) -> int:
        """Running requests whose last block is full and who do not wait for their last token."""
        block_size = self._batch.manager.block_size
        return sum(
            len(request.block_ids) * block_size == request.num_computed_tokens < request.max_total_tokens - 1
            for request in self._batch.requests
        )

    def _choose_for_underserved(self, waiting: FairQueue) -> Iterator[Request]:
        """Make room for waiting requests that lack a row or blocks and whose tenants hold less than others.

        For as many as can begin in this step. They are admitted later in it, after the decodes, and are
        charged meanwhile what they will be charged then, so that the next one is the one that will be next.
        """
        batch = self._batch
        head = waiting.peek()
        if head is None or not self._has_others(head, waiting) or not batch.lacks_room(head):
            return
        promised = Promised(Holdings(self._holders, batch))
        while head is not None:
            hits = batch.manager.find_prefix(head)
            num_tokens = self._count_first_tokens(head, hits, promised.num_tokens)
            num_blocks = batch.manager.count_taken(head, hits)
            victims = self._find_victims(head, hits, num_blocks, promised) if num_tokens else None
            if victims is not None:
                waiting.remove(head)  # before a charge or a victim changes who is next
                yield from victims
                promised.add(head, num_blocks, num_tokens)
            elif not num_tokens or not self._pass_over(head, waiting, promised):
                break
            head = waiting.peek()
        waiting.put_back()
        promised.take_back_charges()
        for request in promised.requests:
            waiting.add(request)

    def _pass_over(self, head: Request, waiting: FairQueue, promised: Promised) -> bool:
        """Look on for whom those could make room who hold most, and are next themselves."""
        if account_of(head) is not promised.holdings.find_greatest():
            return False
        return waiting.pass_over(head, self._batch.config.max_num_seqs)

    def _has_others(self, head: Request, waiting: FairQueue) -> bool:
        """Whether there is a row to give, and anybody to give it but the tenant of the first request."""
        num_used = self._batch.num_used_rows
        return account_of(head).num_rows < num_used or (num_used > 0 and waiting.num_tenants > 1)

    def _find_victims(
        self, head: Request, hits: list[int], num_blocks: int, promised: Promised
    ) -> list[Request] | None:
        """Who gives `head` the row and the `num_blocks` that it needs to begin beside those in `promised`.

        None if that is not possible, or would give its tenant more than others keep.
        """
        batch, account, num_promised = self._batch, account_of(head), promised.num_rows
        lacking_rows = num_promised + head.num_rows - len(batch.free_rows)
        lacking_blocks = (
            promised.num_blocks
            + num_blocks
            + batch.num_reserved_blocks
            + num_promised
            - batch.manager.pool.num_free
        )
        floor = promised.holdings.share(account, head.num_rows, num_blocks)
        victims: list[Request] = []
        while lacking_rows > 0 or lacking_blocks > 0:
            victim = promised.holdings.take_excess(floor, account.counter)
            if victim is None:
                return None
            victims.append(victim)
            lacking_rows -= victim.num_rows
            # Its part of the reserve comes free as well.
            lacking_blocks -= victim.num_rows + batch.manager.count_freed(victim, hits)
        return victims

    def _count_first_tokens(self, head: Request, hits: list[int], num_promised: int) -> int:
        """Tokens of `head` that fit into this step beside decodes and `num_promised` others, 0 if none."""
        if head.num_placeholders:
            return 0
        batch = self._batch
        num_left = batch.max_step_tokens - batch.num_used_rows - num_promised
        num_missing = head.num_tokens - len(hits) * batch.manager.block_size
        if not batch.config.enable_chunked_prefill and num_missing > num_left:
            return 0
        return max(0, min(num_missing, num_left))
