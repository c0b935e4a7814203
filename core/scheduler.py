"""Scheduler: which requests compute how many tokens in the next step. One rule for prefill and decode:

    a request is given up to (known + placeholders - computed) tokens, within the step's token budget,
    the rows and the free blocks; running requests first, then waiting ones, both in `Request.order`.

Decodes come first, a token each, so nothing makes a running stream miss a step. Prefill takes what is left;
prompts longer than `long_prefill_token_threshold` together get at most that many tokens in a step that also
decodes (0: a quarter of max_num_batched_tokens), so a long prompt stretches a decoding step by a bounded
time. Short prompts are bounded by the budget only: holding them back costs every stream more than it saves.
Without chunked prefill a prompt goes whole, and nothing is stretched less than that.

Preemption is recompute, of the last request in order, so the first one always gets on and nothing livelocks.
Order is arrival (fcfs) or priority value, then arrival. Under `priority` a waiting request also displaces
running ones of a strictly worse value if it lacks their row or blocks, and only if that is enough for it.
The fair policy is in fair_scheduler.py.

It knows requests, rows and steps in flight; not clients, outputs, time or what a token means.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..ipc.config import SchedulerConfig
from ..ipc.step import NewRequestData, SchedulerOutput
from .kv_cache_manager import KVCacheManager
from .request import Request, RequestStatus
from .request_queue import RequestQueue, WaitingRequests
from .stats import EngineCounters
from .tenant import Tenant

# Of the requests that enter rows in one step, beyond the first: 256 prompts of 131,072 tokens whose
# beginnings are cached would else be one frame of 134 MB, and one of 8 MB takes 35 ms to encode.
MAX_NEW_BYTES = 1024 * 1024
# A prompt's token with a logprob, in those without: a row of logits is computed for it, and ranked (1 ms of a
# core at a vocabulary of 152,000).
SCORED_TOKEN_PRICE = 4


@dataclass(slots=True, eq=False)
class Step:
    """One step, from when it is put together until its result is in. Parallel lists: `rows` to `requests`."""

    step_id: int
    token_budget: int
    long_prefill_budget: int
    rows: list[int] = field(default_factory=list[int])
    num_tokens: list[int] = field(default_factory=list[int])
    requests: list[Request] = field(default_factory=list[Request])
    sampled: list[Request] = field(default_factory=list[Request])  # those that sample, in the order of `rows`
    sampled_rows: list[int] = field(default_factory=list[int])
    new_requests: list[NewRequestData] = field(default_factory=list[NewRequestData])
    new_bytes: int = 0  # the price of those
    new_block_ids: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    indexed_blocks: list[int] = field(default_factory=list[int])  # findable, though only this step fills them
    prompt_starts: dict[int, int] = field(
        default_factory=dict[int, int]
    )  # row -> first token, with prompt_logprobs
    # Of the policy fair only:
    launched_at: float = 0.0  # monotonic clock
    is_exclusive: bool = False  # with a newcomer's prompt, without those who are limited
    limited: frozenset[Tenant] = frozenset()
    limited_budget: int = 0  # of them, for prompts
    num_limited_tokens: int = 0  # of them, in the step

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_tokens)


class Scheduler:
    """Owns the queue, the running list, the rows and the steps in flight."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        counters: EngineCounters,
        waiting: WaitingRequests | None = None,
    ) -> None:
        """`waiting`: the empty queue that says who is next; None takes requests by `Request.order`."""
        self._config = config
        self._manager = manager
        self._counters = counters
        self._long_threshold = config.long_prefill_token_threshold or max(
            1, config.max_num_batched_tokens // 4
        )
        self.waiting = RequestQueue() if waiting is None else waiting
        self.running: list[Request] = []  # sorted by `order`, so the last one is the one to preempt
        self.in_flight: deque[Step] = deque()
        self._next_step_id = 0
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._withheld_rows: list[int] = []  # while steps are limited to fewer
        self._rows_to_free: list[int] = []  # the worker hears of them with the next step
        self._max_step_tokens = config.max_num_batched_tokens
        self._num_untried = 0  # requests that came, or came back, after the last step was put together

    # -- entering and leaving

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        self.waiting.add(request)
        self._num_untried += 1

    def finish(self, requests: Iterable[Request]) -> None:
        """Take out requests that were just given a finish_reason, wherever they are.

        Row and blocks are free at once, also while a step in flight still computes the request: the worker
        executes in order, so whatever that step writes is there before a new owner's first write.
        """
        num_stopped = 0
        for request in requests:
            was_running = request.status is RequestStatus.RUNNING
            request.status = RequestStatus.FINISHED
            if was_running:
                self._release(request)
                num_stopped += 1
            else:
                self.waiting.remove(request)
        if num_stopped:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def complete_step(self) -> Step:
        """Take the oldest step in flight, whose result has come."""
        return self.in_flight.popleft()

    def index_full_blocks(self, request: Request) -> None:
        """Tell the prefix index of blocks that a token which has just become known completes.

        If a step is in flight, it may be the one that fills them: the newest at the latest.
        """
        indexed = self.in_flight[-1].indexed_blocks if self.in_flight else []
        self._manager.index_full_blocks(request, indexed)

    def preempt_all(self) -> None:
        """Forget rows and steps in flight, as the worker has; every running request waits again."""
        for step in self.in_flight:
            self._manager.forget(step.indexed_blocks)
            for request in step.sampled:
                request.num_placeholders = 0
        self.in_flight.clear()
        self._num_untried += len(self.running)  # each has a row again in the next step
        while self.running:
            self._preempt_last()
        self._rows_to_free.clear()

    def limit_steps(self, max_tokens: int, max_rows: int) -> None:
        """Form no step of more tokens or rows from now on. Fewer than now only when nothing runs."""
        rows = self._free_rows + self._withheld_rows
        num_withheld = self._config.max_num_seqs - max_rows
        assert not self.running or num_withheld <= len(self._withheld_rows), "rows of running requests"
        self._max_step_tokens = max_tokens
        self._withheld_rows = rows[:num_withheld]
        self._free_rows = rows[num_withheld:]

    # -- one step

    def next_schedule_at(self) -> float | None:
        """When `schedule` is to be called again though nothing arrives; None if never. Monotonic clock."""
        return None

    def schedule(self) -> SchedulerOutput | None:
        """Put the next step together; None if run_ahead steps are in flight or nothing can run now."""
        if len(self.in_flight) >= self._config.run_ahead:
            return None
        self._num_untried = 0
        budget = self._max_step_tokens
        step = Step(self._next_step_id, budget, budget)
        self._make_room()
        prefills = self._schedule_decodes(step, self._choose_decodes(step))
        if step.rows:
            step.long_prefill_budget = self._long_threshold
        self._schedule_prompts(step, prefills)
        return self._launch(step) if step.rows else None

    def _make_room(self) -> None:
        """Preempt for the sake of waiting requests."""
        self._displace_for_urgent()

    def _choose_decodes(self, step: Step) -> list[Request]:
        """The running requests, without those whose decode is not for this step."""
        del step
        return self.running

    def _schedule_decodes(self, step: Step, requests: list[Request]) -> list[Request]:
        """Give each of these that lacks one token this token; return those that lack more.

        The budget suffices: whoever decodes had at least one token of the step before.
        """
        prefills: list[Request] = []
        add_row, add_request = step.rows.append, step.requests.append
        block_size = self._manager.block_size
        for request in requests:  # preemption may shorten the running list's end meanwhile
            computed = request.num_computed_tokens
            known = request.num_tokens + request.num_placeholders
            if known - computed != 1:
                prefills.append(request)
                continue
            if known >= request.max_total_tokens:
                continue  # its last token is on the way
            if computed == len(request.block_ids) * block_size and not self._grow(step, request):
                break
            request.num_computed_tokens = known
            request.num_placeholders += 1
            add_row(request.row)  # pyright: ignore[reportArgumentType]
            add_request(request)
        step.token_budget -= len(step.rows)
        step.num_tokens = [1] * len(step.rows)
        step.sampled = step.requests.copy()
        step.sampled_rows = step.rows.copy()
        return prefills

    def _schedule_prompts(self, step: Step, prefills: list[Request]) -> None:
        """Running prompts, then waiting requests, strictly in order: what does not fit is not overtaken."""
        for request in prefills:
            self._schedule_prefill(step, request)
        while step.token_budget and self._free_rows:
            request = self.waiting.peek()
            if request is None or not self._admit(step, request):
                return

    def _schedule_prefill(self, step: Step, request: Request) -> None:
        """Give a running request the next part of its prompt."""
        num_tokens = self._size_chunk(step, request, request.num_tokens - request.num_computed_tokens)
        if num_tokens:
            self._add_chunk(step, request, num_tokens)

    def _admit(self, step: Step, request: Request) -> bool:
        """Let the next waiting request in, if tokens and blocks suffice; there is a free row."""
        if request.num_placeholders:
            return False  # preempted, and steps in flight still sample tokens for it
        if step.new_requests and step.new_bytes + request.held_bytes > MAX_NEW_BYTES:
            return False
        hits = self._manager.find_prefix(request)
        num_missing = request.num_tokens - len(hits) * self._manager.block_size
        num_tokens = self._size_chunk(step, request, num_missing)
        if num_tokens == 0 or not self._manager.allocate(request, hits, self._reserve):
            return False
        self.waiting.pop()
        self._enter(step, request)
        self._add_chunk(step, request, num_tokens)
        return True

    def _launch(self, step: Step) -> SchedulerOutput:
        self._next_step_id += 1
        self.in_flight.append(step)
        freed_rows, self._rows_to_free = self._rows_to_free, []
        return SchedulerOutput(
            step.step_id, step.rows, step.num_tokens, step.new_requests, freed_rows, step.new_block_ids
        )

    # -- parts of the above

    @property
    def _reserve(self) -> int:
        """Blocks that stay free when a request is admitted: one for each running request.

        Each will soon fill its last block; admitting into these would preempt the newcomer right away.
        """
        return len(self.running)

    def _size_chunk(self, step: Step, request: Request, num_missing: int) -> int:
        """How many of `num_missing` tokens of the request's prompt this step takes, 0 if none."""
        if not self._config.enable_chunked_prefill:
            return num_missing if num_missing <= step.token_budget else 0
        if request.sampling_params.prompt_logprobs is not None:
            num_missing = min(num_missing, -(-step.long_prefill_budget // SCORED_TOKEN_PRICE))
        elif num_missing > self._long_threshold:
            num_missing = min(num_missing, step.long_prefill_budget)
        return min(num_missing, step.token_budget)

    def _add_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        """Enter `num_tokens` tokens of a prompt in the step; the last of them samples."""
        assert request.row is not None
        step.token_budget -= num_tokens
        has_scores = request.sampling_params.prompt_logprobs is not None
        num_priced = num_tokens * SCORED_TOKEN_PRICE if has_scores else num_tokens
        step.long_prefill_budget = max(0, step.long_prefill_budget - num_priced)
        self._counters.prompt_tokens += num_tokens
        step.rows.append(request.row)
        step.num_tokens.append(num_tokens)
        step.requests.append(request)
        if request.sampling_params.prompt_logprobs is not None:
            step.prompt_starts[request.row] = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_placeholders += 1
            step.sampled.append(request)
            step.sampled_rows.append(request.row)
        if request.num_computed_tokens >= request.next_index_at:
            self._manager.index_full_blocks(request, step.indexed_blocks)

    def _enter(self, step: Step, request: Request) -> None:
        """Make an admitted request running, in a row of its own."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        if self._manager.reads_cache(request):
            self._counters.prefix_cache_queries += request.num_tokens
            self._counters.prefix_cache_hits += request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        request.row = self._free_rows.pop()
        request.tenant.num_rows += 1
        request.tenant.num_blocks += len(request.block_ids)
        insort(self.running, request, key=lambda running: running.order)
        step.new_requests.append(request.to_new_request_data())
        step.new_bytes += request.held_bytes

    def _grow(self, step: Step, request: Request) -> bool:
        """One more block for a decoding request; False if it had to be preempted itself, being the last."""
        while (block_id := self._manager.grow(request)) is None:
            if self._preempt_last() is request:
                return False
        assert request.row is not None
        step.new_block_ids.append((request.row, [block_id]))
        request.tenant.num_blocks += 1
        return True

    def _displace_for_urgent(self) -> None:
        """Preempt running requests of a worse priority that the first waiting one cannot start beside."""
        urgent = self.waiting.peek()
        if urgent is None or urgent.num_placeholders or not self.running:
            return
        if self.running[-1].priority <= urgent.priority:
            return
        manager, pool = self._manager, self._manager.pool
        hits = manager.find_prefix(urgent)
        worse = [request for request in self.running if request.priority > urgent.priority]
        # At best every block of theirs comes free; if even that is too little, let them run.
        num_blocks = sum(len(request.block_ids) for request in worse)
        num_staying = len(self.running) - len(worse)
        if manager.count_taken(urgent, hits) + num_staying > pool.num_free + num_blocks:
            return
        while worse and (
            not self._free_rows or manager.count_taken(urgent, hits) + self._reserve > pool.num_free
        ):
            worse.remove(self._preempt_last())

    def _preempt_last(self) -> Request:
        """Send the last running request back to the queue; tokens on their way to it stay valid."""
        request = self.running.pop()
        self._put_back(request)
        return request

    def _put_back(self, request: Request) -> None:
        """Let a request wait that has just left the running list."""
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self.waiting.add(request)

    def _release(self, request: Request) -> None:
        assert request.row is not None
        request.tenant.num_rows -= 1
        request.tenant.num_blocks -= len(request.block_ids)
        self._manager.free(request)
        self._free_rows.append(request.row)
        self._rows_to_free.append(request.row)
        request.row = None

    # -- looking in

    @property
    def num_queued(self) -> int:
        """Requests that wait, without those that came just now and may find a free row in the next step."""
        return max(0, len(self.waiting) - min(self._num_untried, len(self._free_rows)))

    def why_waiting(self, request: Request) -> str:
        """Why a request that waits does not run, for a person. Costs no more than one look at the queue."""
        head = self.waiting.peek()
        if head is None or head is request:
            return self._why_head_waits(request)
        return f"behind earlier requests; the first of them: {self._why_head_waits(head)}"

    def _why_head_waits(self, head: Request) -> str:
        if head.num_placeholders:
            return "preempted, and a token of it is still on its way"
        if not self._free_rows:
            return f"no free row ({len(self.running)} running, max_num_seqs={self._config.max_num_seqs})"
        num_needed = self._manager.count_taken(head, self._manager.find_prefix(head))
        num_free, num_kept = self._manager.pool.num_free, self._reserve
        if num_needed + num_kept > num_free:
            kept = f", {num_kept} of them kept for running requests" if num_kept else ""
            return f"needs {num_needed:,} KV blocks, {num_free:,} are free{kept}"
        if self.in_flight and self.in_flight[-1].token_budget == 0:
            return f"token budget of the step is spent ({self._max_step_tokens})"
        return "for the next step"

    # -- integrity

    def check(self) -> list[str]:
        """What is wrong with rows, lists and placeholders; empty if nothing is."""
        problems: list[str] = []
        rows = [request.row for request in self.running]
        if sorted(self._free_rows + self._withheld_rows + [row for row in rows if row is not None]) != list(
            range(self._config.max_num_seqs)
        ):
            problems.append(f"free rows {self._free_rows} and running rows {rows} are not all rows once")
        if any(a.order >= b.order for a, b in zip(self.running, self.running[1:], strict=False)):
            problems.append("the running list is out of order")
        for request in self.running:
            if request.status is not RequestStatus.RUNNING:
                problems.append(f"{request.request_id} runs with status {request.status.name}")
        waiting = list(self.waiting)
        if len(waiting) != len(self.waiting):
            problems.append(f"{len(self.waiting)} waiting requests counted, {len(waiting)} found")
        for request in waiting:
            if request.row is not None or request.block_ids or request.num_computed_tokens:
                problems.append(f"{request.request_id} waits and holds a row or blocks")
        for request in [*self.running, *waiting]:
            num_sampling = sum(request in step.sampled for step in self.in_flight)
            if request.num_placeholders != num_sampling:
                problems.append(
                    f"{request.request_id}: {request.num_placeholders} placeholders, {num_sampling} to come"
                )
        return problems
