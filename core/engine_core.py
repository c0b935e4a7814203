"""EngineCore: requests, aborts and step results in; steps and outputs out. No sockets, no torch, no waiting.

It owns the live requests and what is owed to each client: exactly one final output a request, and every
token once, at its position. What runs when is the scheduler's. The caller (the busy loop, or a test) calls
`schedule` and hands on what it returns, hands results to `update` in order, and delivers `take_outputs`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ..ipc.config import EngineConfig
from ..ipc.errors import ProtocolError
from ..ipc.fair_share import has_room
from ..ipc.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineMetrics,
    EngineSnapshot,
    ErrorCode,
    FinishReason,
    SchedulerStats,
    drop_positions,
)
from ..ipc.request_price import find_held_bytes
from ..ipc.step import ModelRunnerOutput, RowLogprobs, SchedulerOutput, StepFailed
from ..ipc.token_ids import count_token_ids
from .admission import find_refusal
from .blame import FAILURES_ALONE, Blame, WorkerDeath
from .block_hash import BlockHasher
from .block_pool import BlockPool
from .deadlines import Deadlines
from .fair_scheduler import FairScheduler
from .kv_cache_manager import KVCacheManager
from .poison_report import FoundBy, PoisonReport, make_poison_report
from .remarks import Remarks
from .request import Request, drop_finished
from .scheduler import Scheduler, Step
from .snapshot import Inspector, Surroundings
from .stats import EngineCounters
from .step_limits import StepLimits
from .tenant import Tenant, TenantLedger

EXPENSIVE_BYTES = 1024 * 1024  # of a request that the log tells of
# The sampler tells neither case from the other: both leave a row without a number to choose.
BAD_LOGITS = "the logits are not finite, or allowed_token_ids, bad_words and min_tokens leave no token"


class EngineCore:
    """The engine as a state machine; one thread calls it.

    Run-ahead: `schedule` may be called while `config.scheduler.run_ahead - 1` steps are in flight. Requests
    then carry placeholders, and one that stops has a slot in the next step whose result is dropped.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        clock: Callable[[], float] = time.time,
        hash_seed: bytes | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        num_deaths_alone: Mapping[str, int] | None = None,
    ) -> None:
        """`num_blocks`: of the worker's KV cache. `hash_seed`: keys the prefix index, random if None.

        `clock` is the wall clock, which may jump: for times that are shown and the order of arrivals.
        `monotonic` is what timeouts are measured by. `num_deaths_alone`: request -> engine cores before this
        one that died while it ran alone.
        """
        cache = config.cache
        hasher = BlockHasher(cache.block_size, config.model.shape, hash_seed)
        self.counters = EngineCounters()
        self._accepted_at = -1.0  # when the step before's tokens were taken
        self._num_first_tokens = 0  # of the step whose tokens are being taken
        self._config = config
        self._clock = clock
        self._monotonic = monotonic
        self._pool = BlockPool(num_blocks)
        self._manager = KVCacheManager(
            self._pool, cache.block_size, hasher if cache.enable_prefix_caching else None
        )
        self._scheduler = (
            FairScheduler(config.scheduler, self._manager, self.counters, monotonic)
            if config.scheduler.policy == "fair"
            else Scheduler(config.scheduler, self._manager, self.counters)
        )
        self._blame = Blame(self._scheduler)
        self._limits = StepLimits(
            config.scheduler.max_num_batched_tokens,
            config.scheduler.max_num_seqs,
            can_split=config.scheduler.enable_chunked_prefill,
        )
        self._tenants = TenantLedger()
        self._inspector = Inspector(
            config, self.counters, self._scheduler, self._blame, self._pool, self._tenants
        )
        self._window, self._observations = self._inspector.window, self._inspector.observations
        self._weights: dict[bytes, float] = {}  # of clients that said one
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}
        self._ids_of: dict[bytes, set[str]] = {}  # client -> its live requests; none: no entry
        self._outbox: dict[bytes, list[EngineCoreOutput]] = {}
        self._num_arrivals = 0
        self._num_deaths_alone = num_deaths_alone or {}
        self._poison_reports: list[PoisonReport] = []
        self.remarks = Remarks(monotonic)

    # -- requests

    def set_client(self, client: bytes, weight: float) -> None:
        """Its share under the fair policy, 1.0 if never called; counts from its next activity on."""
        self._weights[client] = weight

    def add_request(self, client: bytes, request: EngineCoreRequest) -> None:
        """Take a request on. One that can never run, whose id is live, or that finds the queue full is
        answered with ERROR at once.
        """
        refusal = self._find_refusal(request)
        if refusal is not None:
            self._refuse(client, request, refusal, ErrorCode.REFUSED)
            return
        held_bytes = find_held_bytes(request)
        if held_bytes >= EXPENSIVE_BYTES:
            self.remarks.note("expensive request", f"{request.request_id!r} holds {held_bytes} bytes")
        tenant = self._tenants.enter(request.tenant or client, self._weights.get(client, 1.0), held_bytes)
        overload = self._find_overload(request, tenant, held_bytes)
        if overload is not None:
            self._tenants.leave(tenant, held_bytes)
            self._refuse(client, request, overload, ErrorCode.OVERLOADED)
            return
        now = self._clock()
        self._num_arrivals += 1
        # A clock that is wrong in a frontend must not let it wait for ever, nor break the order.
        arrival = min(request.arrival_time, now) if math.isfinite(request.arrival_time) else now
        rank = 0 if self._config.scheduler.policy == "fcfs" else request.priority
        order = (rank, arrival, self._num_arrivals)
        longest = self._config.model.max_model_len
        live = Request.from_message(request, client, tenant, order, longest, now, self._monotonic())
        self._requests[live.request_id] = live
        self._ids_of.setdefault(client, set()).add(live.request_id)
        self._blame.add(live)
        if live.timeout_at is not None or live.queue_timeout_at is not None:
            self._deadlines.add(live)
        reason = live.find_finish()  # with the tokens that it comes with
        if reason is not None:
            self._finish([live], reason)
        elif self._num_deaths_alone.get(live.request_id, 0) >= FAILURES_ALONE:
            error = f"{FAILURES_ALONE} engine cores died while it ran alone"
            self._convict(live, ErrorCode.POISON_REQUEST, "core death", error)

    def abort_requests(self, client: bytes, request_ids: Iterable[str]) -> None:
        """End these requests of this client with ABORT; ids that are not live or not its own are ignored."""
        own = self._ids_of.get(client, set())
        self._finish(self._find_live(own.intersection(request_ids)), FinishReason.ABORT)

    def remove_client(self, client: bytes) -> None:
        """End a client's requests without an answer: nobody is there to read it."""
        self._finish(self._find_live(self._ids_of.get(client, set())), FinishReason.ABORT)
        self._outbox.pop(client, None)
        self._inspector.forget_client(client)
        self._weights.pop(client, None)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, by the monotonic clock; None if never, as things are."""
        return self._deadlines.next()

    def expire(self, now: float) -> None:
        """End requests whose time is up at `now`, by the monotonic clock.

        After timeout_s one ends with ABORT and the tokens it has, also while steps in flight compute it.
        After queue_timeout_s it ends with ERROR, QUEUE_TIMEOUT, if it was never part of a step.
        """
        while (due := self._deadlines.pop_due(now)) is not None:
            request, is_of_queue = due
            if is_of_queue:
                error = f"queue_timeout_s={request.queue_timeout_s:g}: it waited so long and has not begun"
                self._finish([request], FinishReason.ERROR, error, ErrorCode.QUEUE_TIMEOUT)
            else:
                self._finish([request], FinishReason.ABORT)

    # -- steps

    def next_schedule_at(self) -> float | None:
        """When `schedule` is to be called again though nothing arrives; None if never. Monotonic clock."""
        return None if self._blame.must_wait else self._scheduler.next_schedule_at()

    def schedule(self) -> SchedulerOutput | None:
        """The next step for the worker; None if run_ahead steps are in flight, it is too early for the
        next one (`next_schedule_at`), or nothing can run now.
        """
        began = self._clock()
        if self._requests:
            self._window.note(began, is_start=not self._scheduler.in_flight)
        output = None if self._blame.must_wait else self._scheduler.schedule()
        now = self._clock()
        if output is not None:
            self.counters.num_steps += 1
            if output.new_requests:  # they are the last in the step
                for request in self._scheduler.in_flight[-1].requests[-len(output.new_requests) :]:
                    request.scheduled_time = request.scheduled_time or now
        self.counters.schedule_s += now - began
        return output

    def update(self, output: ModelRunnerOutput) -> None:
        """Take the result of the oldest step in flight; results of forgotten steps are ignored.

        Raises ProtocolError if the worker answers another step or other rows than were asked for.
        """
        if not self._is_oldest(output.step_id):
            return
        began = self._clock()
        self._window.note(began, is_start=False)
        step = self._scheduler.complete_step()
        self._observations.observe_step(step.num_scheduled_tokens)
        if output.rows != step.sampled_rows or len(output.token_ids) != len(output.rows):
            raise ProtocolError(f"step {step.step_id} sampled rows {step.sampled_rows}, not {output.rows}")
        logprobs: dict[int, RowLogprobs] = {}
        if output.logprobs:
            logprobs = {entry.row: entry for entry in output.logprobs}
            self._send_prompt_logprobs(step, logprobs)
        if output.bad_rows:
            self._fail_bad_rows(step, output.bad_rows)
        self._accept_tokens(step, output.token_ids, logprobs, began)
        self._blame.note_step()
        if self._limits.note_success():
            self._scheduler.limit_steps(self._limits.max_tokens, self._limits.max_rows)
        self.counters.update_s += self._clock() - began

    def fail_step(self, failed: StepFailed) -> bool:
        """The oldest step raised: every request waits to be computed again, and the culprit is looked for.

        The one request that fails alone ends with the cause. After one that was too large for the memory,
        steps are smaller for a while. False: this answers a step that was forgotten with an earlier failure;
        nothing is done.
        """
        if not self._is_oldest(failed.step_id):
            return False
        if failed.is_out_of_memory:
            self._shrink_steps(failed)
            return True
        culprit = self._blame.take_failure(drop_finished(self._scheduler.in_flight[0].requests))
        if culprit is not None:
            self._convict(culprit, ErrorCode.POISON_REQUEST, "step", failed.error, failed.step_id)
        return True

    def lose_worker(self, reason: str) -> WorkerDeath:
        """The worker was lost: its rows, steps and cache are gone, and every request waits again.

        A request that was alone at several deaths ends with `reason`.
        """
        was_searching = self._blame.is_searching
        steps = self._scheduler.in_flight
        in_flight = {request.request_id: request for step in steps for request in step.requests}
        culprit = self._blame.take_death(drop_finished(in_flight.values()))
        self._pool.unregister_all()
        if culprit is not None:
            self._convict(culprit, ErrorCode.POISON_REQUEST, "worker death", reason)
        if not self._blame.explains_deaths:
            return WorkerDeath.UNEXPLAINED
        if culprit is not None:
            return WorkerDeath.CONVICTED
        return WorkerDeath.SEARCHED if was_searching else WorkerDeath.UNEXPLAINED

    def take_reset(self) -> bool:
        """True once after the worker's rows have become void: send it ResetRows before the next step."""
        return self._blame.take_reset()

    @property
    def alone(self) -> str | None:
        """The request that the next step is of if nothing else may run, because it is suspected."""
        return self._blame.alone

    def take_poison_reports(self) -> list[PoisonReport]:
        """Requests that were convicted since the last call."""
        reports, self._poison_reports = self._poison_reports, []
        return reports

    def take_outputs(self) -> dict[bytes, list[EngineCoreOutput]]:
        """What is to be delivered, per client in order; the next call starts anew."""
        outbox, self._outbox = self._outbox, {}
        return outbox

    # -- looking in

    @property
    def step_limits(self) -> tuple[int, int]:
        """Most tokens and most requests of a step at present: fewer than configured after a shortage."""
        return self._limits.max_tokens, self._limits.max_rows

    @property
    def num_in_flight(self) -> int:
        """Steps handed out whose result has not come."""
        return len(self._scheduler.in_flight)

    @property
    def num_unfinished(self) -> int:
        """Live requests."""
        return len(self._requests)

    @property
    def has_unfinished_requests(self) -> bool:
        """True while some request has no final output yet."""
        return bool(self._requests)

    def stats(self, num_clients: int | None = None) -> SchedulerStats:
        """A look at this moment. `num_clients` are attached; None counts those that have live requests."""
        return self._inspector.stats(len(self._ids_of) if num_clients is None else num_clients)

    def snapshot(self, surroundings: Surroundings) -> EngineSnapshot:
        """What live views show."""
        return self._inspector.snapshot(surroundings, self._ids_of, self._clock())

    def metrics(self, num_clients: int | None = None) -> EngineMetrics:
        """Everything that was counted since the start; `num_clients` as for `stats`."""
        return self._inspector.metrics(self.stats(num_clients))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, with nothing changed, while requests hold blocks."""
        if self._pool.num_free < self._pool.num_blocks:
            return False
        self._pool.unregister_all()
        return True

    def check_integrity(self) -> list[str]:
        """What is wrong with blocks, rows and requests; empty if nothing is. Walks everything."""
        scheduler = self._scheduler
        live = [*scheduler.running, *scheduler.waiting, *self._blame.parked]
        problems = self._manager.check(live) + scheduler.check()
        if {id(request) for request in live} != {id(request) for request in self._requests.values()}:
            problems.append(f"{len(live)} requests run or wait, {len(self._requests)} are live")
        ended = [request.request_id for request in live if request.finish_reason is not None]
        problems += [f"{request_id} has finished and is still here" for request_id in ended]
        problems += self._tenants.check(Counter(request.tenant for request in self._requests.values()))
        owned = sorted(request_id for ids in self._ids_of.values() for request_id in ids)
        if owned != sorted(self._requests) or not all(self._ids_of.values()):
            problems.append("the clients' requests are not the live requests")
        return problems

    # -- parts of the above

    def _find_refusal(self, request: EngineCoreRequest) -> str | None:
        if request.request_id in self._requests:
            return f"request_id={request.request_id!r}: a request with this id is running"
        return find_refusal(request, self._config, self._pool.num_blocks)

    def _find_overload(self, request: EngineCoreRequest, tenant: Tenant, held_bytes: int) -> str | None:
        """Why one more request may not wait, None if it may. The tenant's account has it already.

        Under the fair policy a tenant has its share of both bounds. A resumed request was taken on before, so
        it finds a place; its bytes do while there are twice as many, which is as far as shares reach.
        """
        config = self._config.scheduler
        was_taken_on = request.is_resumed or bool(request.output_token_ids)
        share = tenant.weight / self._tenants.active_weight if config.policy == "fair" else 0.0
        bound = config.max_num_queued_reqs
        if bound is not None and not was_taken_on:
            taken = self._scheduler.num_queued + max(0, len(self._blame.parked) - config.max_num_seqs)
            if not has_room(1, taken, tenant.num_live - 1 - tenant.num_rows, bound, share):
                return f"{taken} requests wait already, and max_num_queued_reqs={bound}: try again later"
        bound = config.max_queued_bytes
        if bound is not None:
            taken, own = self._tenants.held_bytes - held_bytes, tenant.held_bytes - held_bytes
            if not has_room(held_bytes, taken, own, 2 * bound if was_taken_on else bound, share):
                return (
                    f"it takes {held_bytes} bytes, live requests hold {taken} ({own} of them this tenant's), "
                    f"and max_queued_bytes={bound}: try again later"
                )
        return None

    def _is_oldest(self, step_id: int) -> bool:
        """True if this answers the oldest step in flight, False if it answers a forgotten one."""
        in_flight = self._scheduler.in_flight
        if in_flight and in_flight[0].step_id == step_id:
            return True
        if in_flight and in_flight[0].step_id < step_id:
            raise ProtocolError(f"the worker answered step {step_id} before step {in_flight[0].step_id}")
        return False

    def _shrink_steps(self, failed: StepFailed) -> None:
        """As `fail_step`, for want of memory; a request that is too large alone ends with OUT_OF_MEMORY."""
        step, limits = self._scheduler.in_flight[0], self._limits
        may_retry = limits.shrink(step.num_scheduled_tokens, len(step.rows))
        requests = drop_finished(step.requests)
        self._blame.take_shortage()
        self._scheduler.limit_steps(limits.max_tokens, limits.max_rows)
        if not may_retry:
            limits.forget_failures()
            for request in requests:
                self._convict(request, ErrorCode.OUT_OF_MEMORY, "step", failed.error, failed.step_id)

    def _accept_tokens(
        self, step: Step, token_ids: list[int], logprobs: dict[int, RowLogprobs], now: float
    ) -> None:
        """Append each sampled token to its request, end those that stop, and put the outputs out."""
        finished: list[Request] = []
        outbox = self._outbox
        num_accepted = 0
        num_apart = self._observe_odd_gaps(step, now)
        self._num_first_tokens = 0
        for i, (request, token_id) in enumerate(zip(step.sampled, token_ids, strict=True)):
            if request.finish_reason is not None:
                continue  # it ended while this step ran
            num_accepted += 1
            start = len(request.output_token_ids)
            request.append(token_id)
            if request.num_tokens >= request.next_index_at:
                self._scheduler.index_full_blocks(request)
            if token_id in request.stop_token_ids or request.num_tokens >= request.max_total_tokens:
                request.finish_reason = request.find_finish()
                if request.finish_reason is not None:
                    finished.append(request)
            request.last_token_time = now
            if request.finish_reason is None and request.first_token_time is not None and not logprobs:
                output = EngineCoreOutput(request.request_id, start, [token_id])
            else:
                output = self._describe(request, start, logprobs.get(step.sampled_rows[i]), now)
            try:
                outbox[request.client].append(output)
            except KeyError:
                outbox[request.client] = [output]
        self.counters.generation_tokens += num_accepted
        num_apart += self._num_first_tokens
        self._observations.observe_gap(now - self._accepted_at, num_accepted - num_apart)
        self._accepted_at = now
        self._forget(finished)

    def _observe_odd_gaps(self, step: Step, now: float) -> int:
        """Observe the time since the last token of requests that had none in the step before; how many.

        Those come last in a step, since decodes come first: all others share one gap, counted at once.
        """
        num_apart = 0
        for request in reversed(step.sampled):
            if request.last_token_time == self._accepted_at:
                break
            if request.first_token_time is not None and request.finish_reason is None:
                self._observations.observe_gap(now - request.last_token_time)
                num_apart += 1
        return num_apart

    def _describe(
        self, request: Request, start: int, logprobs: RowLogprobs | None, now: float
    ) -> EngineCoreOutput:
        """The output of a token that is the first or the last, or has logprobs."""
        is_first = request.first_token_time is None
        if is_first:
            request.first_token_time = now
            self._num_first_tokens += 1
            if start == 0:
                self._observations.observe_first_token(request, now)
        return EngineCoreOutput(
            request_id=request.request_id,
            start=start,
            new_token_ids=[request.output_token_ids[-1]],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=logprobs.sample if logprobs is not None else None,
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            times=request.to_times() if request.finish_reason is not None else None,
        )

    def _send_prompt_logprobs(self, step: Step, logprobs: dict[int, RowLogprobs]) -> None:
        """Put out what a step says of prompts, without positions that were delivered before a preemption."""
        for row, request in zip(step.rows, step.requests, strict=True):
            entry = logprobs.get(row)
            if entry is None or entry.prompt is None or request.finish_reason is not None:
                continue
            num_known = request.num_prompt_logprobs - step.prompt_starts[row]
            block = drop_positions(entry.prompt, num_known)
            if block.num_positions:
                request.num_prompt_logprobs += block.num_positions
                output = EngineCoreOutput(
                    request.request_id, request.num_output_tokens, [], prompt_logprobs=block
                )
                self._send(request.client, output)

    def _fail_bad_rows(self, step: Step, bad_rows: list[int]) -> None:
        """End requests whose logits cannot be sampled. Their K and V may be bad: nobody finds them again."""
        bad = set(bad_rows)
        failed = [
            request
            for row, request in zip(step.sampled_rows, step.sampled, strict=True)
            if row in bad and request.finish_reason is None
        ]
        for request in failed:
            self._manager.forget_contents(request)
        self._finish(failed, FinishReason.ERROR, BAD_LOGITS, ErrorCode.BAD_LOGITS)

    def _find_live(self, request_ids: Iterable[str]) -> list[Request]:
        return [self._requests[request_id] for request_id in request_ids]

    def _refuse(self, client: bytes, request: EngineCoreRequest, error: str, code: ErrorCode) -> None:
        """Answer a request that was not taken on."""
        self._observations.observe_refusal()
        self.remarks.note(f"request {code}", f"{request.request_id!r}: {error}")
        start = count_token_ids(request.output_token_ids)
        end = FinishReason.ERROR
        output = EngineCoreOutput(request.request_id, start, [], end, error=error, error_code=code)
        self._send(client, output)

    def _finish(
        self,
        requests: list[Request],
        reason: FinishReason,
        error: str | None = None,
        code: ErrorCode | None = None,
    ) -> None:
        """End live requests without a further token, and answer each."""
        for request in requests:
            request.finish_reason = reason
            output = EngineCoreOutput(
                request.request_id,
                request.num_output_tokens,
                [],
                reason,
                request.stop_reason,
                error,
                times=request.to_times(),
                error_code=code,
            )
            self._send(request.client, output)
        self._forget(requests)

    def _convict(
        self, request: Request, code: ErrorCode, found_by: FoundBy, error: str, step_id: int | None = None
    ) -> None:
        """End the one request that makes something fail."""
        self._poison_reports.append(make_poison_report(request, code, found_by, error, step_id))
        self._finish([request], FinishReason.ERROR, error, code)

    def _forget(self, finished: list[Request]) -> None:
        """Let go of requests that have their finish_reason and their last output."""
        if not finished:
            return
        self._blame.finish(finished)
        for request in finished:
            self._inspector.note_end(request)
            del self._requests[request.request_id]
            self._tenants.leave(request.tenant, request.held_bytes)
            own = self._ids_of[request.client]
            own.discard(request.request_id)
            if not own:
                del self._ids_of[request.client]

    def _send(self, client: bytes, output: EngineCoreOutput) -> None:
        self._outbox.setdefault(client, []).append(output)
