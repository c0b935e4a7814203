"""FairPolicy: tokens, time, rows and blocks are shared among tenants by weight.

Tokens: the tenant with the least counter (fair_accounts.py) is next; its requests run by priority value, then
arrival. Prompts of running and of waiting requests are ordered together, and each chunk is charged at once,
so that one tenant's long prompts do not take a step from others' prompts. Tokens that are computed again
after a preemption are not charged again.
Time: while newcomers come, tenants with many more rows that were served no less give way (step_pacer.py). A
step for which other tenants' decodes wait has no more tokens of one tenant's prompts, however many, than of
one long prompt.
Rows and blocks: requests of tenants above their share are preempted for tenants below it
(fair_preemption.py). A request that causes a preemption decodes or begins in that step, so that some request
always makes progress.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ...ipc.protocol.messages import EngineCoreRequest
from ..scheduling.request import QueueOrder, Request
from ..scheduling.running_batch import RunningBatch
from ..scheduling.step import Step
from .fair_accounts import Account, AccountKey, Accounts, FairQueue, FairRecord, account_of, record_of
from .fair_preemption import FairPreemption
from .policy import Policy
from .step_pacer import PROMPT_TOKENS_A_ROW, PacedStep, StepPacer, is_in_excess

_FADING = 0.75  # of a step's rows in the next one


class FairPolicy(Policy[FairQueue]):
    """The policy `fair`."""

    make_queue = FairQueue
    shares_bounds = True

    def __init__(self, batch: RunningBatch, monotonic: Callable[[], float]) -> None:
        super().__init__(batch, monotonic)
        self._accounts = Accounts()
        self._pacer = StepPacer(monotonic, batch.times)
        self._holders: dict[Account, None] = {}  # tenants of running requests
        self._preemption = FairPreemption(batch, self._holders)
        self._recent: dict[Account, None] = {}  # tenants with `recent_load`
        self._prefilling: dict[Request, None] = {}  # running, with a part of the prompt to come
        self._was_exclusive = False
        self._max_beside = batch.config.max_prompt_tokens_beside_decodes

    # -- who waits

    def rank(self, request: EngineCoreRequest) -> int:
        """Counts among requests of one tenant."""
        return request.options.priority

    def add(self, request: Request) -> None:
        """As Policy.add; a new request gets its record."""
        if request.policy_data is None:
            request.policy_data = FairRecord(self._accounts.enter(request.tenant))
        super().add(request)

    # -- what a step is to hold

    def next_schedule_at(self) -> float | None:
        """Shortly before the running step ends, if it is one that newcomers limit."""
        steps = self.batch.in_flight
        if len(steps) != 1 or self.batch.config.run_ahead == 1:
            return None
        paced: PacedStep = steps[0].policy_data
        left = paced.prompt_budget
        # Over half of the budget is used. The step after a short one need not be late.
        is_long = left is not None and sum(paced.num_prompt_tokens.values()) > left
        return self._pacer.find_submit_time(steps[0]) if paced.limited or is_long else None

    def choose_victims(self) -> Iterator[Request]:
        """Requests of tenants that hold most."""
        return self._preemption.choose_victims(self.waiting)

    def choose_decodes(self, step: Step) -> list[Request]:
        """All; but while newcomers come, tenants in excess decode in turns, and not at all in a newcomer's
        first step.

        Never are two steps in a row kept free of them, so that endless newcomers do not stop those decodes.
        """
        paced = step.policy_data = PacedStep()
        newcomer = self._find_newcomer()
        if newcomer is not None:
            self._pacer.note_newcomer(account_of(newcomer), self._count_prompt(newcomer))
        self._was_exclusive = paced.is_exclusive = newcomer is not None and not self._was_exclusive
        paced.prompt_budget = self._pacer.limit_prompts()
        in_excess = self._pacer.find_in_excess(self._holders | self._recent)
        if in_excess is None:
            return self.batch.requests
        paced.limited = in_excess
        chosen: list[Request] = []
        limited: list[Request] = []
        for request in self.batch.requests:  # without account_of: see note_launch
            known = request.num_tokens + request.num_placeholders
            account: Account = request.policy_data.account
            if account not in in_excess or known - request.num_computed_tokens != 1:
                chosen.append(request)
            elif known < request.max_total_tokens:
                limited.append(request)
            elif request.pooling_params is not None:
                chosen.append(request)  # the last token of its prompt, not a decode
        return chosen if paced.is_exclusive else chosen + self._take_turns(step, limited)

    def is_exclusive(self, step: Step) -> bool:
        """As Policy.is_exclusive."""
        return step.policy_data.is_exclusive

    def _take_turns(self, step: Step, decodes: list[Request]) -> list[Request]:
        """The decodes of tenants in excess that are in this step; sets the budget of their prompts.

        Those whose last turn is longest ago get one. They are last in the returned list, as requests that
        were in the step before come first in a step.
        """
        paced: PacedStep = step.policy_data
        limit = self._pacer.limit_tokens(len(decodes))
        if limit is None:
            limit = step.token_budget
        num_decodes = limit - self._count_prompt_tokens(paced.limited, limit // 2)
        decodes.sort(key=lambda request: request.policy_data.last_decode_step)
        taken = decodes[:num_decodes]
        for request in taken:
            request.policy_data.last_decode_step = step.step_id
        paced.num_limited_tokens = len(taken)
        paced.limited_budget = max(1, limit - len(taken))
        taken.reverse()
        return taken

    def _count_prompt_tokens(self, accounts: frozenset[Account], most: int) -> int:
        """Prompt tokens that these tenants could have in this step, up to `most`."""
        prompts = [request for request in self._prefilling if account_of(request) in accounts]
        head = self.waiting.peek() if self.batch.has_free_row else None
        if head is not None and account_of(head) in accounts:
            prompts.append(head)
        return min(most, sum(request.num_tokens - request.num_computed_tokens for request in prompts))

    def _count_prompt(self, request: Request) -> int:
        """Tokens of a prompt that a step would hold."""
        left = request.num_tokens - request.num_computed_tokens
        return min(left, self.batch.config.max_num_batched_tokens)

    def _find_newcomer(self) -> Request | None:
        """A request with a prompt to compute in this step beside tenants in excess."""
        if not self._prefilling and not self.waiting:
            return None
        head = self.waiting.peek()
        num_others = len(self._recent) - (head is None or account_of(head) in self._recent)
        if num_others <= 0:
            return None  # no other tenant runs: the usual case
        greatest = max(self._recent, key=lambda account: account.share)
        for request in self._prefilling:
            account = account_of(request)
            if account is not greatest and is_in_excess(greatest, account, self._count_prompt(request)):
                return request
        if head is None or not is_in_excess(greatest, account_of(head), self._count_prompt(head)):
            return None
        can_begin = self.batch.has_free_row and not head.num_placeholders and not self.batch.lacks_room(head)
        return head if can_begin else None

    def choose_prompts(self, step: Step, prefills: list[Request]) -> Iterator[Request]:
        """Running prompts and waiting requests by the keys of their tenants, which grow with each part."""
        if not prefills and not self.waiting:
            return
        running: list[tuple[AccountKey, QueueOrder, Request]] = [
            (account_of(request).key, request.order, request) for request in prefills
        ]
        heapq.heapify(running)
        first = self.waiting.peek()
        if len(self._holders) > 1 or (first is not None and account_of(first) not in self._holders):
            paced: PacedStep = step.policy_data
            paced.decoding = self._find_decoding(step)
            paced.least_decoding = min((account.counter for account in paced.decoding), default=0.0)
        may_admit = True
        while step.token_budget and (running or may_admit):
            if running and running[0][0] != account_of(running[0][2]).key:
                request = running[0][2]
                heapq.heapreplace(running, (account_of(request).key, request.order, request))
                continue
            head = self.waiting.peek() if may_admit and self.batch.has_free_row else None
            if running and (head is None or running[0][0] <= account_of(head).key):
                yield heapq.heappop(running)[2]
            elif head is None:
                break
            else:
                yield head
                most = self.batch.config.max_num_seqs
                may_admit = head.row is not None or self.waiting.pass_over(head, most)
        self.waiting.put_back()

    def _find_decoding(self, step: Step) -> frozenset[Account]:
        """The tenants whose next tokens wait for the end of this step, including those left out of it."""
        paced: PacedStep = step.policy_data
        decoding = frozenset(map(account_of, step.sampled))
        return decoding | paced.limited if paced.is_exclusive else decoding

    def limit_chunk(self, step: Step, request: Request, num_tokens: int) -> int:
        """What its tenant may still have beside others' decodes, and in the budget of tenants in excess."""
        paced: PacedStep = step.policy_data
        account = account_of(request)
        left = num_tokens
        if paced.decoding - {account}:
            most = self._max_beside
            if not paced.limited and account.counter > paced.least_decoding:
                most = self._pacer.limit_beside(most)
            left = most - paced.num_prompt_tokens.get(account, 0)
        if account in paced.limited:
            left = min(left, paced.limited_budget)
        if paced.prompt_budget is not None:
            left = min(left, paced.prompt_budget)
        if not self.batch.config.enable_chunked_prefill:
            return num_tokens if left > 0 else 0
        return max(0, min(num_tokens, left))

    # -- what has happened

    def note_enter(self, step: Step, request: Request) -> None:
        """Count its rows and blocks, and that it overtook the requests that were passed over."""
        record = record_of(request)
        record.account.num_rows += 1
        record.account.num_blocks += request.num_blocks
        self._holders[record.account] = None
        for passed in self.waiting.list_set_aside():
            record_of(passed).num_overtaken += 1
        record.num_charged_tokens = max(record.num_charged_tokens, request.num_computed_tokens)
        record.last_decode_step = step.step_id

    def note_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        """Charge it at once."""
        record = record_of(request)
        paced: PacedStep = step.policy_data
        num_new = request.num_computed_tokens - record.num_charged_tokens
        if num_new > 0:
            record.account.charge(num_new)
            record.num_charged_tokens = request.num_computed_tokens
        if request.num_computed_tokens < request.num_tokens:
            self._prefilling[request] = None
        else:
            self._prefilling.pop(request, None)
        num_before = paced.num_prompt_tokens.get(record.account, 0)
        paced.num_prompt_tokens[record.account] = num_before + num_tokens
        if paced.prompt_budget is not None:
            paced.prompt_budget -= num_tokens
        self._note_limited(step, record.account, num_tokens)

    def note_blocks(self, request: Request, num_more: int) -> None:
        """Count them."""
        request.policy_data.account.num_blocks += num_more  # 16 of 256 decodes a step need one: no calls

    def _note_limited(self, step: Step, account: Account, num_tokens: int) -> None:
        """Take a prompt's tokens from the budget of tenants in excess, if this is one."""
        paced: PacedStep = step.policy_data
        if account in paced.limited:
            paced.limited_budget = max(0, paced.limited_budget - num_tokens)
            paced.num_limited_tokens += num_tokens

    def note_work(self, request: Request, num_tokens: float) -> None:
        """Charge it like tokens."""
        account_of(request).charge(num_tokens)

    def note_held(self, requests: Sequence[Request]) -> None:
        """Let their tenants save up no service meanwhile, with which they could keep all rows as long."""
        self._accounts.catch_up({account_of(request) for request in requests})

    def note_launch(self, step: Step) -> None:
        """Charge the decodes."""
        for request in step.requests:  # without Account.charge: calling it takes 0.04 ms at 256 rows
            record: FairRecord = request.policy_data
            num_computed = request.num_computed_tokens
            num_new = num_computed - record.num_charged_tokens
            if num_new > 0:
                account = record.account
                account.counter += num_new / account.weight
                account.is_served = True
                record.num_charged_tokens = num_computed
        self._note_load(step.policy_data.num_prompt_tokens)

    def _note_load(self, num_prompt_tokens: dict[Account, int]) -> None:
        """Let the rows and prompts of earlier steps fade, and count this one's."""
        self._recent |= self._holders
        for account in list(self._recent):
            load = account.num_rows + num_prompt_tokens.get(account, 0) / PROMPT_TOKENS_A_ROW
            account.recent_load = max(load, _FADING * account.recent_load)
            if account.recent_load < 1:
                account.recent_load = 0.0
                del self._recent[account]

    def note_complete(self, step: Step) -> None:
        """Note how long it took."""
        self._pacer.note_end(step)

    def note_release(self, request: Request) -> None:
        """Subtract its rows and blocks."""
        account = account_of(request)
        account.num_rows -= 1
        account.num_blocks -= request.num_blocks
        self._prefilling.pop(request, None)
        if account.num_rows == 0:
            del self._holders[account]

    def note_finish(self, request: Request) -> None:
        """Its tenant has one less."""
        account = account_of(request)
        self._accounts.leave(account)
        if not account.num_live:
            self._recent.pop(account, None)
            account.recent_load = 0.0

    # -- looking in

    def why_waiting(self, request: Request) -> str:
        """As Policy.why_waiting, with the tenant's part in it."""
        head, account = self.waiting.peek(), account_of(request)
        if head is None or head is request:
            return self.why_head_waits(request)
        if request is not self.waiting.first_of(account):
            return "behind earlier requests of its tenant"
        if account.counter > account_of(head).counter:
            return "its tenant has been served more than others"
        return f"behind a request of another tenant: {self.why_head_waits(head)}"

    def check(self) -> list[str]:
        """As Policy.check, and the tenants' rows and blocks."""
        running = self.batch.requests
        problems = super().check() + self._accounts.check([*running, *self.waiting, *self.parked])
        rows: Counter[Account] = Counter()
        for request in running:
            rows[account_of(request)] += 1
        if rows.keys() != self._holders.keys() or any(account.num_rows != rows[account] for account in rows):
            problems.append("the tenants' rows are not those of the running requests")
        for account in rows:
            held = sum(request.num_blocks for request in running if account_of(request) is account)
            if account.num_blocks != held:
                problems.append(f"tenant {account.name!r} counts {account.num_blocks} blocks, holds {held}")
        return problems
