"""WorkTurns: whose tokens a step may hold that take long for themselves: by grammars, processors, logprobs.

The worker says what a row's own work took (`RowWork`), and everybody in the step waits for it. Rows whose
next token may take long are dear, and take turns: tenants by the time that their rows have had (start-time
fair queueing, Goyal et al., SIGCOMM 1996), the rows of a tenant by who waited longest. All others are in
every step.

Beside others dear rows get WORK_SHARE of the time that the model's passes take, so that a neighbour's answer
takes 1 + WORK_SHARE times as long and two rows' work longer. Tenants earn it by weight. A step takes a
tenant's rows while that has credit; what they took beyond it is paid back before its next one has its turn,
up to _MAX_DEBT_US, and no other tenant's waits for that. A step holds at most 2 * BURST_US of them all;
without others as much as a pass takes, if that is more: who comes meanwhile waits no longer for it, and at
most half of the engine's time is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ipc.protocol.kept_grammars import KeptGrammars
from ...ipc.protocol.step import MIN_ROW_WORK_US, ModelRunnerOutput
from .answer_cost import find_logprobs_work_us
from .request import Request
from .running_batch import RunningBatch
from .step import Step
from .tenant import Tenant, TenantName

# What the worker lets a row's mask take on average, and what is reckoned with until it is known.
MAX_ROW_WORK_US = 10_000
NEW_GRAMMAR_US = 20_000  # likewise with a compile
REPLAY_TOKEN_US = 3  # of a row's output, that its grammar goes by again when it enters
BURST_US = 10_000  # one row of the dearest has its turn at once
WORK_SHARE = 0.5
_DECAY = 0.9  # a turn: what takes long now and then is dear in between
_MIN_PASS_US = 500  # also of a worker that does not say: whoever waits gets on
_MAX_DEBT_US = 250_000  # of a tenant's rows that all turned dear at once
_MAX_CREDITS = 64  # tenants that earn in a step; who owes least is forgiven for one more
_SMOOTHING = 0.125  # of what one pass took
_USUAL_NOISE = 1.5  # times a pass


@dataclass(slots=True)
class GrammarWork:
    """What rows of a compiled grammar take; None: nobody knows yet."""

    is_compiling: bool = True  # until the first token of the row that the worker compiles it for
    entry_us: int | None = None  # a row's first token, which may bring a process of its own
    work_us: int | None = None  # any other


@dataclass(slots=True)
class Credit:
    """What a tenant's dear rows may take beside others."""

    weight: float
    us: float = float(BURST_US)


class WorkTurns:
    """The dear ones of the running requests, and what they have cost. Costs nothing while there are none."""

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._dear: dict[Request, None] = {}  # running
        self._compiled: KeptGrammars[GrammarWork] = KeptGrammars()  # by the worker
        self._extra_us = MAX_ROW_WORK_US  # of a request with extra_args that is new
        self._credits: dict[TenantName, Credit] = {}  # all others have BURST_US; debts outlive their requests
        self._pass_us = 0.0  # of steps of nothing but decodes; 0: none was seen
        self._clock_us = 0.0  # the start of the last turn, in the time that tenants' rows have had
        self._num_turns = 0

    # -- who is dear

    def enter(self, request: Request) -> None:
        """A request has a row from now on."""
        if self._find_price(request) >= MIN_ROW_WORK_US:
            self._dear[request] = None

    def leave(self, request: Request) -> None:
        """A request loses its row: its own work begins anew in the next one."""
        self._dear.pop(request, None)
        request.num_measured = 0
        request.entry_work_us = REPLAY_TOKEN_US * request.num_output_tokens if request.grammar else 0

    def reset(self) -> None:
        """All rows are lost, and perhaps what the worker has compiled."""
        self._compiled.clear()
        self._credits.clear()

    def _find_price(self, request: Request) -> int:
        """What its next token is reckoned to take."""
        work_us = request.work_us
        if work_us is None:
            work_us = self._reckon(request)
        elif request.grammar and not request.num_measured:
            work_us = max(work_us, self._find_entry_us(request.grammar))
        return max(work_us, request.entry_work_us)

    def _find_entry_us(self, grammar: str) -> int:
        """What the first token of one more row with this grammar is reckoned to take."""
        compiled = self._compiled.find(grammar)
        if compiled is None:
            return NEW_GRAMMAR_US
        return MAX_ROW_WORK_US if compiled.entry_us is None else compiled.entry_us

    def _reckon(self, request: Request) -> int:
        """As `_find_price` of a request that no token is known of."""
        work_us = max(find_logprobs_work_us(request), self._extra_us if request.extra_args else 0)
        if request.grammar:
            work_us = max(work_us, self._find_entry_us(request.grammar))
            compiled = self._compiled.find(request.grammar)
            if compiled is not None:
                work_us = max(work_us, MAX_ROW_WORK_US if compiled.work_us is None else compiled.work_us)
        return work_us

    # -- what a step is to hold

    def limit(self, step: Step, decodes: list[Request]) -> list[Request]:
        """Of the requests that may decode in this step those that do, in their order; not to be changed."""
        if not self._dear:
            return decodes
        for request in [one for one in self._dear if self._find_price(one) < MIN_ROW_WORK_US]:
            del self._dear[request]  # a row of the same grammar has shown it
        ready = [request for request in decodes if request in self._dear and _decodes(request)]
        if not ready:
            return decodes
        self._take_turns(step, ready, self._has_others)
        step.held = [request for request in ready if request not in step.work_prices]
        if not step.held:
            return decodes
        held = set(step.held)
        return [request for request in decodes if request not in held]

    def take_held(self, step: Step) -> list[Request]:
        """Those left out of a step that would be empty, which nobody else waits for: as many as may be."""
        self._take_turns(step, step.held, False)
        return [request for request in step.held if request in step.work_prices]

    def may_begin(self, step: Step, request: Request) -> bool:
        """Whether a request whose prompt this step could complete may have its first token in it.

        Beside others one dear request of a step may, if its tenant had credit before the turns of this step.
        """
        price_us = self._find_price(request)
        if price_us < MIN_ROW_WORK_US or request.pooling_params is not None:
            return True
        prices, tenant = step.work_prices, request.tenant
        if sum(prices.values()) >= self._find_step_budget_us(self._has_others):
            return False
        if not self._has_others:
            return True
        own_us = sum(one_us for other, one_us in prices.items() if other.tenant is tenant)
        return self._find_credit_us(tenant) + own_us > 0 and not step.has_begun_dear

    def begin(self, step: Step, request: Request) -> None:
        """A request has its first token in this step."""
        if (price_us := self._find_price(request)) >= MIN_ROW_WORK_US:
            step.has_begun_dear = True
            self._charge(step, request, price_us)
        if request.grammar:
            self.note_sample(request)

    @property
    def _has_others(self) -> bool:
        return len(self._batch.requests) > len(self._dear)

    def _find_step_budget_us(self, has_others: bool) -> float:
        """What a step may hold of all tenants' dear rows."""
        return 2.0 * BURST_US if has_others else max(2.0 * BURST_US, self._pass_us)

    def _find_credit_us(self, tenant: Tenant) -> float:
        credit = self._credits.get(tenant.name)
        return BURST_US if credit is None else credit.us

    def _change_credit(self, tenant: Tenant, change_us: float) -> None:
        credit = self._credits.get(tenant.name)
        if credit is None:
            if len(self._credits) >= _MAX_CREDITS:  # debts of tenants that come and go must not add up
                del self._credits[max(self._credits, key=lambda name: self._credits[name].us)]
            credit = self._credits[tenant.name] = Credit(tenant.weight)
        credit.us = min(BURST_US, credit.us + change_us)

    def _take_turns(self, step: Step, ready: Sequence[Request], has_others: bool) -> None:
        """Charge those whose turn it is, while some of the budget is left: the last may go beyond it."""
        budget_us = self._find_step_budget_us(has_others)
        for request in self._order_turns(ready, has_others):
            if budget_us <= 0:
                return
            price_us = self._find_price(request)
            budget_us -= price_us
            self._charge(step, request, price_us)

    def _order_turns(self, ready: Sequence[Request], has_others: bool) -> Iterator[Request]:
        """Who is next; whoever comes out has its turn before the next one is asked for.

        Beside others only of tenants with credit.
        """
        queues: dict[Tenant, list[Request]] = {}
        for request in sorted(ready, key=lambda one: one.last_turn, reverse=True):
            queues.setdefault(request.tenant, []).append(request)
        order = [(self._find_start(tenant), place, tenant) for place, tenant in enumerate(queues)]
        heapq.heapify(order)
        while order:
            _, place, tenant = heapq.heappop(order)
            if has_others and self._find_credit_us(tenant) <= 0:
                continue
            yield queues[tenant].pop()
            if queues[tenant]:
                heapq.heappush(order, (self._find_start(tenant), place, tenant))

    def _find_start(self, tenant: Tenant) -> float:
        return max(self._clock_us, tenant.work_clock_us)

    def _charge(self, step: Step, request: Request, price_us: int) -> None:
        self._num_turns += 1
        request.last_turn = self._num_turns
        step.work_prices[request] = price_us
        tenant = request.tenant
        self._change_credit(tenant, -price_us)
        self._clock_us = self._find_start(tenant)
        tenant.work_clock_us = self._clock_us + price_us / tenant.weight

    # -- what has happened

    def note_sample(self, request: Request) -> None:
        """A row with a grammar is about to have its first token: the worker compiles what it has not kept."""
        if self._compiled.use(request.grammar) is None:
            self._compiled.keep(request.grammar, GrammarWork())

    def note_result(self, step: Step, output: ModelRunnerOutput) -> list[tuple[Request, float]]:
        """Learn what rows took. Each of them with what that comes to in tokens of this step."""
        prices = step.work_prices
        execute_us = 1e6 * output.execute_s
        if not output.row_work and not prices:
            if self._dear or self._credits:
                self._note_pass(step, execute_us)
            return []
        found: dict[Request, int] = {}
        request_of = dict(zip(step.sampled_rows, step.sampled, strict=True))
        for entry in output.row_work:
            request = request_of[entry.row]
            found[request] = found.get(request, 0) + entry.work_us
        pass_us = self._price_in(step, execute_us, found)
        self._earn(pass_us)
        for request in {**prices, **found}:
            self._note_row(request, found.get(request, 0), prices.get(request, 0))
        token_us = pass_us / max(1, step.num_scheduled_tokens)
        return [(request, work_us / token_us) for request, work_us in found.items()]

    def _note_pass(self, step: Step, execute_us: float) -> None:
        """A step without dear rows took so long."""
        if step.num_scheduled_tokens == len(step.sampled):
            change_us = execute_us - self._pass_us
            self._pass_us += change_us * (_SMOOTHING if self._pass_us else 1.0)
        self._earn(execute_us)

    def _price_in(self, step: Step, execute_us: float, found: dict[Request, int]) -> float:
        """The part of a step that is the model's; what rows are not said to have taken is put on theirs.

        A process for each row, and the way there and back, are nobody's processor time in the worker.
        """
        total_us = sum(found.values())
        rest_us = max(execute_us - total_us, _MIN_PASS_US)
        if step.num_scheduled_tokens > len(step.sampled):
            return min(rest_us, self._pass_us or _MIN_PASS_US)
        # Steps with dear rows only show that it is less; those without show how much it is.
        self._pass_us = min(self._pass_us or rest_us, rest_us)
        surplus_us = rest_us - _USUAL_NOISE * self._pass_us
        if surplus_us > 0:
            for request, work_us in found.items():
                found[request] = int(work_us * (1 + surplus_us / total_us))
        return self._pass_us

    def _earn(self, pass_us: float) -> None:
        earned_us = WORK_SHARE * max(_MIN_PASS_US, pass_us)
        weights = sum(credit.weight for credit in self._credits.values())
        for name, credit in list(self._credits.items()):
            credit.us = max(-_MAX_DEBT_US, credit.us) + earned_us * credit.weight / weights
            if credit.us >= BURST_US:
                del self._credits[name]

    def _note_row(self, request: Request, work_us: int, price_us: int) -> None:
        """One row took so long, and was reckoned to take `price_us`."""
        request.total_work_us += work_us
        tenant = request.tenant
        self._change_credit(tenant, price_us - work_us)
        tenant.work_clock_us += (work_us - price_us) / tenant.weight
        if request.row is None:
            return
        # The first token of a row comes with a compile or a replay, which no other one has.
        is_first, request.num_measured = not request.num_measured, request.num_measured + 1
        if is_first or request.num_measured == 2:
            request.work_us = min(work_us, MAX_ROW_WORK_US)
        else:
            request.work_us = max(work_us, int(_DECAY * (request.work_us or 0)))
        request.entry_work_us = 0
        if is_first and request.grammar:
            self._note_entry(request.grammar, work_us)
        if not is_first or work_us < MIN_ROW_WORK_US:
            self._note_kind(request, work_us)
        if request.work_us >= MIN_ROW_WORK_US:
            self._dear[request] = None

    def _note_entry(self, grammar: str, work_us: int) -> None:
        """A row's first token took so long; that of the row that it was compiled for tells nothing."""
        compiled = self._compiled.find(grammar)
        if compiled is None:
            return
        if not compiled.is_compiling or work_us < MIN_ROW_WORK_US:
            compiled.entry_us = max(work_us, int(_DECAY * (compiled.entry_us or 0)))
        compiled.is_compiling = False

    def _note_kind(self, request: Request, work_us: int) -> None:
        """What is to be reckoned with of others like it."""
        if request.extra_args:
            self._extra_us = max(work_us, int(_DECAY * self._extra_us))
        compiled = self._compiled.find(request.grammar) if request.grammar else None
        if compiled is not None:
            compiled.work_us = max(work_us, int(_DECAY * (compiled.work_us or 0)))


def _decodes(request: Request) -> bool:
    """Whether it lacks one token, and a step is to compute that."""
    known = request.num_tokens + request.num_placeholders
    return known - request.num_computed_tokens == 1 and known < request.max_total_tokens
