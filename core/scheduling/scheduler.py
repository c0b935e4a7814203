"""Scheduler: which requests compute how many tokens in the next step. One rule for prefill and decode:

    a request is given up to (known + placeholders - computed) tokens, within the step's token budget,
    the rows and the free blocks; running requests first, then waiting ones, as the policy orders them.

Decodes come first, a token each, so nothing makes a running stream miss a step, or its turn where the
worker has several stages. Prefill takes what is left; long prompts (`long_prefill_token_threshold`)
together have a part of a step that also decodes: so many tokens at most, and no more than measured steps say
may come in the time that streams wait (`max_gap_ms`, step_times.py). Holding short ones back costs every
stream more than it saves.

Preemption is recompute. A decode that lacks a block takes it from the last request in `Request.order`, so the
first one always gets on and nothing livelocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from ...ipc.protocol.messages import FinishReason
from ...ipc.protocol.step import ModelRunnerOutput, SchedulerOutput
from ...ipc.spec.config import SchedulerConfig
from ..kv.kv_cache_manager import KVCacheManager, PrefixHit
from ..kv.prefix_misses import PrefixMiss
from ..policies import POLICIES
from ..stats.stats import EngineCounters
from .answer_cost import MAX_STEP_ANSWER_BYTES, find_token_price, may_run_beside
from .request import Request, RequestStatus
from .request_queue import WaitingRequests
from .running_batch import RunningBatch
from .stage_turns import take_next_turn, take_turn
from .step import Step
from .step_times import StepTimes
from .work_turns import WorkTurns

# Of the requests that enter rows in one step, beyond the first: 256 prompts of 131,072 tokens whose
# beginnings are cached would else be one frame of 134 MB, and one of 8 MB takes 35 ms to encode.
MAX_NEW_BYTES = 1024 * 1024


class Scheduler:
    """Forms steps, and moves requests between the policy's queue and the running batch."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        counters: EngineCounters,
        monotonic: Callable[[], float],
    ) -> None:
        """`monotonic`: the clock that steps are timed by."""
        self._config = config
        self._manager = manager
        self._counters = counters
        self._long_threshold = config.max_prompt_tokens_beside_decodes
        gap_ms = config.max_gap_ms if config.enable_chunked_prefill else 0
        max_gap_s = None if gap_ms is None else gap_ms / 1000
        self.times = StepTimes(monotonic, max_gap_s, config.num_stages)
        self.batch = RunningBatch(config, manager, self.times)
        self.policy = POLICIES[config.policy](self.batch, monotonic)
        self.in_flight = self.batch.in_flight
        self._turns = WorkTurns(self.batch)
        self._next_step_id = 0
        self._lacks_work = False  # when a step was last to be formed
        self._num_untried = 0  # requests that came, or came back, after the last step was put together

    # -- entering and leaving

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        self.policy.add(request)
        if not self.policy.is_parked(request):
            self._num_untried += 1

    def finish(self, requests: Iterable[Request]) -> None:
        """Take out requests that were just given a finish_reason, wherever they are.

        Row and blocks are free at once, also while a step in flight still computes the request: the worker
        executes in order, so whatever that step writes is there before a new owner's first write.
        """
        num_stopped = 0
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                if request.is_continued and request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
                    self._manager.index_tail(request)
                self._release(request)
                num_stopped += 1
            else:
                self.policy.remove(request)
            request.status = RequestStatus.FINISHED
            self.policy.note_finish(request)
        if num_stopped:
            self.batch.requests = [one for one in self.running if one.status is RequestStatus.RUNNING]

    def complete_step(self) -> Step:
        """Take the oldest step in flight, whose result has come."""
        step = self.in_flight.popleft()
        self.times.note_end(step)
        self.policy.note_complete(step)
        return step

    def note_work(self, step: Step, output: ModelRunnerOutput) -> None:
        """Learn from a complete step's result what its rows' own work took; their tenants are charged."""
        for request, num_tokens in self._turns.note_result(step, output):
            self.policy.note_work(request, num_tokens)
        for entry in output.row_work:
            self._counters.row_work_s += 1e-6 * entry.work_us

    def index_full_blocks(self, request: Request) -> None:
        """Tell the prefix index of blocks that a token which has just become known completes.

        If a step is in flight, it may be the one that fills them: the newest at the latest.
        """
        indexed = self.in_flight[-1].indexed_blocks if self.in_flight else []
        self._manager.index_full_blocks(request, indexed)

    def preempt_all(self) -> None:
        """Forget rows and steps in flight, as the worker has; every running request waits again."""
        self.batch.forget_steps()
        self._turns.reset()
        self._num_untried += len(self.running)  # each has a row again in the next step
        while self.running:
            self._preempt(self.running[-1], is_lost=True)
        self.batch.take_freed_rows()

    # -- one step

    def next_schedule_at(self) -> float | None:
        """When `schedule` may form a step though nothing happens before; None if that cannot be."""
        return None if self._lacks_work else self.policy.next_schedule_at()

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None if no more may be in flight, the policy says not yet, or nothing can run."""
        if len(self.in_flight) >= self._config.max_steps_in_flight:
            return None
        self._lacks_work = False
        not_before = self.policy.next_schedule_at()
        if not_before is not None and self.policy.monotonic() < not_before:
            return None
        self._num_untried = 0
        step = self._form_step()
        if not step.rows and self.policy.is_exclusive(step):
            step = self._form_step()  # whom it was kept free for cannot begin yet
        self._lacks_work = not step.rows
        return self._launch(step) if step.rows else None

    def _form_step(self) -> Step:
        budget = self.batch.max_step_tokens
        step = Step(self._next_step_id, budget, budget)
        for victim in self.policy.choose_victims():
            self._preempt(victim)
        decodes = self._turns.limit(step, self.policy.choose_decodes(step))
        num_stages = self._config.num_stages
        turn = decodes if num_stages == 1 else take_turn(decodes, self.in_flight, num_stages, budget)
        prefills = self._schedule_decodes(step, turn)
        if step.rows:
            step.long_prefill_budget = min(step.long_prefill_budget, self._long_threshold)
        if (prefills or self.waiting) and self._delays_streams(step):
            step.prompt_s = self.times.find_prompt_s(len(step.rows), step.long_prefill_budget)
        for request in self.policy.choose_prompts(step, prefills):
            self._schedule_prompt(step, request)
        if num_stages > 1 and not step.rows:
            self._schedule_decodes(step, take_next_turn(decodes, num_stages, self._config.run_ahead, budget))
        if step.held:
            self.policy.note_held(step.held)
            if not step.rows and not self.in_flight and not self.policy.is_exclusive(step):
                self._schedule_decodes(step, self._turns.take_held(step))
        return step

    def _delays_streams(self, step: Step) -> bool:
        """Whether somebody's next token waits for the end of this step."""
        if step.rows or self.policy.is_exclusive(step):
            return True
        return self._config.num_stages > 1 and any(other.sampled for other in self.in_flight)

    def _schedule_decodes(self, step: Step, requests: list[Request]) -> list[Request]:
        """Give each of these that lacks one token this token; return those that lack more.

        The budget suffices: whoever decodes had at least one token of the step before.
        """
        prefills: list[Request] = []
        add_row, add_request = step.rows.append, step.requests.append
        for request in requests:  # preemption may shorten the running list's end meanwhile
            computed = request.num_computed_tokens
            known = request.num_tokens + request.num_placeholders
            if known - computed != 1:
                if known != computed or request.pooling_params is None:  # else its vector is on the way
                    prefills.append(request)
                continue
            if known >= request.max_total_tokens:
                if request.pooling_params is not None:
                    prefills.append(request)
                continue  # its last token is on the way
            if computed == request.num_slots and not self._grow(step, request):
                break
            request.num_computed_tokens = known
            request.num_placeholders += 1
            if request.grammar and not request.num_measured:
                self._turns.note_sample(request)
            add_row(request.row)  # pyright: ignore[reportArgumentType]
            add_request(request)
        step.token_budget -= len(step.rows)
        step.num_tokens = [1] * len(step.rows)
        step.sampled = step.requests.copy()
        step.sampled_rows = step.rows.copy()
        return prefills

    def _grow(self, step: Step, request: Request) -> bool:
        """A block more for a decoding request; False if it had to be preempted itself, being the last."""
        num_before = request.num_blocks
        while (new := self._manager.grow(request)) is None:
            last = self.running[-1]
            if last is request:
                self.policy.note_blocks(request, request.num_blocks - num_before)
            self._preempt(last)
            if last is request:
                return False
        self._note_blocks(step, request, new, num_before)
        return True

    def _note_blocks(
        self, step: Step, request: Request, new: list[tuple[int, list[int]]], num_before: int
    ) -> None:
        """Tell worker and policy of a running request's new blocks; it had `num_before`."""
        assert request.row is not None
        for group, block_ids in new:
            step.new_block_ids.append((request.row, group, block_ids))
        self.policy.note_blocks(request, request.num_blocks - num_before)

    def _make_room(self, step: Step, request: Request, num_tokens: int) -> int:
        """How many of the next tokens of a running request's prompt have blocks, after it was given some.

        The last request gives up its blocks for it, unless it is in the step already: then the rest waits.
        """
        while True:
            num_before = request.num_blocks
            new = self._manager.make_room(request, num_tokens)
            self._note_blocks(step, request, new, num_before)
            if room := request.num_slots - request.num_computed_tokens:
                return min(room, num_tokens)
            last = self.running[-1]
            if last is request or last in step.requests:
                return 0
            self._preempt(last)

    def _schedule_prompt(self, step: Step, request: Request) -> None:
        """Give a running request the next part of its prompt, or admit a waiting one with the first part."""
        if request.row is None:
            self._admit(step, request)
        else:
            num_missing = request.num_tokens - request.num_computed_tokens
            num_tokens = self._size_beginning(step, request, num_missing)
            if request.num_computed_tokens + num_tokens > request.num_slots and self._manager.has_kv:
                num_tokens = self._make_room(step, request, num_tokens)
            if num_tokens:
                self._add_chunk(step, request, num_tokens)

    def _admit(self, step: Step, request: Request) -> None:
        """Let a waiting request in, if tokens and blocks suffice; there is a free row."""
        if request.num_placeholders:
            return  # preempted, and steps in flight still sample tokens for it
        if step.new_requests and step.new_bytes + request.held_bytes - request.answer_bytes > MAX_NEW_BYTES:
            return
        if not may_run_beside(request, self.running):
            return
        manager = self._manager
        hit = manager.find_prefix(request)
        num_missing = request.num_tokens - hit.num_tokens
        num_tokens = self._size_beginning(step, request, num_missing)
        if num_missing == 1 and num_tokens == 0 and hit.num_blocks and not hit.tail:
            # Its last token has to wait: compute others again.
            hit = manager.find_prefix(request, hit.num_blocks - 1)
            num_missing = request.num_tokens - hit.num_tokens
            num_tokens = self._size_beginning(step, request, num_missing)
        if num_tokens == 0:
            return
        if manager.states is not None and manager.awaits_state(request, hit, step.requests):
            return
        if not manager.allocate(request, hit, self.batch.num_reserved_blocks):
            return
        for group, source in enumerate(hit.tail):
            held = request.blocks[group]
            if (block_id := held.ids[hit.num_blocks - held.first]) != source:
                step.block_copies.append((group, source, block_id))
        if request.copied_slot is not None and request.state_slot is not None:
            step.state_copies.append((request.copied_slot, request.state_slot))
        self.policy.remove(request)
        self._enter(step, request, hit)
        self._add_chunk(step, request, num_tokens)

    def _size_beginning(self, step: Step, request: Request, num_missing: int) -> int:
        """As `_size_chunk`; without the last token, if what that is followed by has to wait for its turn."""
        num_tokens = self._size_chunk(step, request, num_missing)
        if num_tokens == num_missing and not self._turns.may_begin(step, request):
            return num_tokens - 1 if self._config.enable_chunked_prefill else 0
        return num_tokens

    def _size_chunk(self, step: Step, request: Request, num_missing: int) -> int:
        """How many of `num_missing` tokens of the request's prompt this step takes, 0 if none."""
        if request.is_token_wise:
            num_missing = self._limit_answers(step, request, num_missing)
        if not self._config.enable_chunked_prefill:
            num_tokens = num_missing if num_missing <= step.token_budget else 0
        elif request.sampling_params.prompt_logprobs is not None:
            num_scored = -(-step.long_prefill_budget // find_token_price(request))
            num_tokens = min(num_missing, num_scored, step.token_budget)
        elif num_missing > self._long_threshold:
            num_tokens = min(num_missing, step.long_prefill_budget, step.token_budget)
        else:
            num_tokens = min(num_missing, step.token_budget)
        if step.prompt_s is not None and (num_missing > self._long_threshold or request.row is not None):
            context = request.num_tokens - num_missing
            num_priced = self.times.count_tokens(step, context)
            num_tokens = min(num_tokens, -(-num_priced // find_token_price(request)))
        return self.policy.limit_chunk(step, request, num_tokens)

    def _limit_answers(self, step: Step, request: Request, num_missing: int) -> int:
        """How many of these tokens may have their vectors in this step; all or none of what is not split."""
        if not step.answer_bytes and not self._config.enable_chunked_prefill:
            return num_missing
        token_bytes = request.answer_bytes // request.num_prompt_tokens
        num_tokens = (MAX_STEP_ANSWER_BYTES - step.answer_bytes) // token_bytes
        if num_tokens < num_missing and not self._config.enable_chunked_prefill:
            return 0
        return min(num_missing, max(num_tokens, 0 if step.answer_bytes else 1))

    def _enter(self, step: Step, request: Request, hit: PrefixHit) -> None:
        """Make an admitted request running, in a row of its own."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        if self._manager.reads_cache(request):
            self._counters.prefix_cache_queries += request.num_tokens
            self._counters.prefix_cache_hits += request.num_computed_tokens
            self._note_miss(request, hit)
        else:
            request.prefix_miss = "not looked up"
        self.batch.enter(request)
        self.policy.note_enter(step, request)
        self._turns.enter(request)
        step.new_requests.append(request.to_new_request_data())
        step.new_bytes += request.held_bytes - request.answer_bytes

    def _note_miss(self, request: Request, hit: PrefixHit) -> None:
        """Count what was not found of an admitted request's prefix; the first reasons are shown."""
        shown: list[str] = []
        for reason, num_tokens in self._manager.explain_miss(request, hit):
            self._counters.count_miss(reason, num_tokens)
            is_lost = reason is PrefixMiss.NO_STATE
            shown.append(f"hit lost for want of a state: {num_tokens} tokens" if is_lost else reason)
        if not request.has_begun:
            request.prefix_miss = "; ".join(shown)

    def _add_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        """Enter `num_tokens` tokens of a prompt in the step; the last of them samples or is pooled."""
        assert request.row is not None
        step.token_budget -= num_tokens
        has_scores = request.sampling_params.prompt_logprobs is not None
        num_priced = num_tokens * find_token_price(request)
        step.long_prefill_budget = max(0, step.long_prefill_budget - num_priced)
        step.chunks.append((request.num_computed_tokens, num_priced))
        if step.prompt_s is not None:
            token_s = self.times.find_token_s(request.num_computed_tokens)
            step.prompt_s = max(0.0, step.prompt_s - num_priced * (token_s or 0.0))
        self._counters.prompt_tokens += num_tokens
        step.rows.append(request.row)
        step.num_tokens.append(num_tokens)
        step.requests.append(request)
        if request.is_token_wise:
            step.prompt_starts[request.row] = request.num_computed_tokens
            step.answer_bytes += request.answer_bytes // request.num_prompt_tokens * num_tokens
        if has_scores:
            step.prompt_starts[request.row] = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens and request.pooling_params is not None:
            step.pooled.append(request)
            step.pooled_rows.append(request.row)
        elif request.num_computed_tokens == request.num_tokens:
            request.num_placeholders += 1
            step.sampled.append(request)
            step.sampled_rows.append(request.row)
            self._turns.begin(step, request)
        if request.num_computed_tokens >= request.next_index_at:
            self._manager.index_full_blocks(request, step.indexed_blocks)
        self.policy.note_chunk(step, request, num_tokens)

    def _launch(self, step: Step) -> SchedulerOutput:
        if self._manager.states is not None:
            self._save_states(step)
        self._next_step_id += 1
        self.in_flight.append(step)
        self.times.note_launch(step)
        self.policy.note_launch(step)
        return SchedulerOutput(
            step.step_id,
            step.rows,
            step.num_tokens,
            step.new_requests,
            self.batch.take_freed_rows(),
            step.new_block_ids,
            step.sampled_rows if len(step.sampled_rows) < len(step.rows) else None,
            step.block_copies,
            step.pooled_rows,
            step.state_copies,
            step.state_saves,
        )

    def _save_states(self, step: Step) -> None:
        """Choose which states of the step's requests are saved, last of all: no request takes the slots."""
        for row, request, num_tokens in zip(step.rows, step.requests, step.num_tokens, strict=True):
            if request.num_computed_tokens >= request.next_save_at:
                saves = self._manager.choose_saves(request, num_tokens, step.saved_states)
                step.state_saves += [(row, n, slot) for n, slot in saves]

    # -- preemption

    def _preempt(self, request: Request, *, is_lost: bool = False) -> None:
        """Send a running request back to the queue; tokens on their way to it stay valid.

        is_lost: what was computed of it in steps that have failed is of no use.
        """
        if not is_lost:
            newest = self.in_flight[-1] if self.in_flight else Step(0, 0, 0)
            self._manager.keep_progress(request, newest.indexed_blocks, newest.saved_states)
        del self.running[bisect_left(self.running, request.order, key=lambda running: running.order)]
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        self.policy.add(request)

    def _release(self, request: Request) -> None:
        self.policy.note_release(request)
        self._turns.leave(request)
        self.batch.release(request)

    # -- looking in

    @property
    def running(self) -> list[Request]:
        """The running requests, sorted by `Request.order`."""
        return self.batch.requests

    @property
    def waiting(self) -> WaitingRequests:
        """The policy's queue."""
        return self.policy.waiting

    @property
    def num_queued(self) -> int:
        """Requests that wait, without those that came just now and may find a free row in the next step."""
        return max(0, len(self.waiting) - min(self._num_untried, len(self.batch.free_rows)))

    def check(self) -> list[str]:
        """What is wrong with the batch, the policy's books and placeholders; empty if nothing is."""
        problems = self.batch.check() + self.policy.check()
        waiting = list(self.waiting)
        for request in waiting:
            if request.row is not None or request.blocks or request.num_computed_tokens:
                problems.append(f"{request.request_id} waits and holds a row or blocks")
        for request in [*self.running, *waiting]:
            num_sampling = sum(request in step.sampled for step in self.in_flight)
            if request.num_placeholders != num_sampling:
                problems.append(
                    f"{request.request_id}: {request.num_placeholders} placeholders, {num_sampling} to come"
                )
        return problems
