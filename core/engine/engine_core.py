"""EngineCore: requests, aborts and step results in; steps and outputs out. No sockets, no torch, no waiting.

It owns the live requests and what is owed to each client: exactly one final output a request, and every
token once, at its position. What runs when is the scheduler's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from ...ipc.errors import ProtocolError
from ...ipc.processes.due import find_earliest
from ...ipc.protocol.engine_views import EngineHistory, EngineMetrics, EngineSnapshot, Owns, SchedulerStats
from ...ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    FrontendCounts,
)
from ...ipc.protocol.request_price import find_held_bytes
from ...ipc.protocol.step import ModelRunnerOutput, RowFailure, RowLogprobs, SchedulerOutput
from ...ipc.protocol.token_ids import count_token_ids
from ...ipc.spec.config import EngineConfig
from ..faults.blame import FAILURES_ALONE, Blame
from ..faults.failures import Failures
from ..kv.block_pool import BlockPool
from ..kv.digests import Digests
from ..kv.kv_cache_manager import HASH_SIZE_BYTES, BlockHasher, KVCacheManager
from ..kv.prefix_misses import PrefixMisses
from ..kv.state_slots import StateSlots
from ..scheduling.admission import find_overload, find_refusal
from ..scheduling.answer_cost import find_answer_bytes, needs_cached_tokens
from ..scheduling.deadlines import Deadlines
from ..scheduling.request import Request, drop_finished
from ..scheduling.scheduler import Scheduler
from ..scheduling.step import Step
from ..scheduling.tenant import ClientShare, TenantLedger
from ..stats.stats import EngineCounters, ThrottledLog
from ..stats.stats_collector import CoreProcessInfo, StatsCollector
from ..stats.step_recorder import StepRecorder
from .engine_outputs import EngineOutputs

_DEFAULT_SHARE = ClientShare()
EXPENSIVE_BYTES = 1024 * 1024  # a request that holds at least this much is logged
BAD_VECTOR = "the vector is not finite"
# The sampler cannot tell the two cases apart: both leave a row without a token to choose.
BAD_LOGITS = "the logits are not finite, or allowed_token_ids, bad_words and min_tokens leave no token"

_MAX_NAMED_ABORTS = 1024  # that are kept for requests on their way,
_MAX_NAMES_KEPT = 64  # of one call: a call of 10,000 must neither hold the loop nor drive out others'


class NamedAborts:
    """Names that were aborted lately, for requests that had begun before and were not here at that moment: a
    beam search between two rounds, or a request that moves between engines.
    """

    def __init__(self) -> None:
        self._aborts: dict[str, tuple[float, Owns | None]] = {}  # name -> when and whose; oldest first

    def note(self, names: Iterable[str], owns: Owns | None, now: float) -> None:
        """These were aborted, of which the first count; `owns` as for `EngineCore.abort_requests`."""
        for name in islice(names, _MAX_NAMES_KEPT):
            self._aborts.pop(name, None)
            self._aborts[name] = now, owns
        while len(self._aborts) > _MAX_NAMED_ABORTS:
            del self._aborts[next(iter(self._aborts))]

    def cover(self, request: Request) -> bool:
        """Whether a request that has come with tokens was among those that were aborted."""
        if not self._aborts:
            return False
        aborts = [self._aborts.get(name) for name in (request.request_id, *request.options.names)]
        return any(
            abort is not None
            and request.arrival_time <= abort[0]
            and (abort[1] is None or abort[1](request.options.tenant))
            for abort in aborts
        )


class EngineCore:
    """The engine as a state machine; one thread calls it.

    Run-ahead: up to `config.scheduler.max_steps_in_flight` steps are in flight. Meanwhile a request carries
    placeholders for its tokens, and what later steps compute for a request that has stopped is dropped.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        clock: Callable[[], float] = time.time,
        hash_seed: bytes | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        num_deaths_alone: Mapping[str, int] | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """`num_blocks`: of the worker's KV cache; `num_state_slots`: for recurrent states. `hash_seed`: keys
        the prefix index, random if None.

        `clock` is the wall clock, which may jump: it gives the times that are shown and the order of
        arrivals. `monotonic` measures timeouts. `num_deaths_alone`: request id -> how many earlier engine
        cores died while this request ran alone.
        """
        cache = config.cache
        hasher = BlockHasher(cache.block_size, config.model.spec, hash_seed)
        self.counters = EngineCounters()
        self._config = config
        self._clock = clock
        self._monotonic = monotonic
        misses = PrefixMisses(cache.block_size)
        states = StateSlots(num_state_slots) if num_state_slots else None

        def note_evicted(name: bytes) -> None:
            misses.note_evicted(name)
            if states is not None:  # of no use without the block that ends where it does
                states.forget(name[:HASH_SIZE_BYTES])

        self._pool = BlockPool(num_blocks, note_evicted if states else misses.note_evicted)
        has_kv = config.model.spec.kv_bytes_per_token(config.model.dtype) > 0
        self._manager = KVCacheManager(
            self._pool,
            cache.block_size,
            hasher if cache.enable_prefix_caching and (has_kv or states) else None,
            misses,
            has_kv=has_kv,
            can_pool_hits=not needs_cached_tokens(config.model.spec.pooling),
            windows=config.model.spec.kv_windows,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
            states=states,
        )
        self._scheduler = Scheduler(config.scheduler, self._manager, self.counters, monotonic)
        self.blame = Blame(self._scheduler)
        self.failures = Failures(config.scheduler, self._scheduler, self.blame, self._finish)
        self._tenants = TenantLedger()
        self._stats_collector = StatsCollector(
            config, self.counters, self._scheduler, self._pool, self._tenants
        )
        self._window, self._observations = self._stats_collector.window, self._stats_collector.observations
        self._shares: dict[bytes, ClientShare] = {}  # client -> what `set_client` said
        self._deadlines = Deadlines()
        self._requests: dict[str, Request] = {}  # the live ones by id
        self.digests = Digests(self._manager, self._requests)
        self._named: dict[str, set[Request]] = {}  # live requests by their users' names, which may be shared
        self._named_aborts = NamedAborts()
        self._ids_of: dict[bytes, set[str]] = {}  # client -> ids of its live requests, at least one
        self._outputs = EngineOutputs(self.counters, self._observations, self._scheduler)
        self._num_arrivals = 0
        self._num_deaths_alone = num_deaths_alone or {}
        self.request_log = ThrottledLog(monotonic)
        self.recorder: StepRecorder | None = None  # while somebody profiles this core

    # -- requests

    def set_client(self, client: bytes, share: ClientShare) -> None:
        """Set how the client's requests count, from its next request on."""
        self._shares[client] = share

    def add_request(self, client: bytes, request: EngineCoreRequest) -> Request | None:
        """Admit a request. One that can never run, whose id is live, or that finds the queue full is
        answered with ERROR at once. Returns the live request, None if it has ended already.
        """
        if request.request_id in self._requests:
            refusal = f"request_id={request.request_id!r}: a request with this id is running"
        else:
            refusal = find_refusal(request, self._config, self._pool.num_blocks)
        if refusal is not None:
            self._answer_refused(client, request, refusal, ErrorCode.REFUSED)
            return None
        answer_bytes = find_answer_bytes(request, self._config.model.spec)
        held_bytes = find_held_bytes(request) + answer_bytes
        if held_bytes >= EXPENSIVE_BYTES:
            self.request_log.note("expensive request", f"{request.request_id!r} holds {held_bytes} bytes")
        share = self._shares.get(client, _DEFAULT_SHARE)
        tenant_name = share.tenant or request.options.tenant or client
        tenant = self._tenants.enter(tenant_name, share.weight, held_bytes)
        overload = find_overload(
            request,
            tenant,
            held_bytes,
            self._config.scheduler,
            self._scheduler,
            self._tenants,
            is_bounded=share.is_bounded,
        )
        if overload is not None:
            self._tenants.leave(tenant, held_bytes)
            self._answer_refused(client, request, overload, ErrorCode.OVERLOADED)
            return None
        now = self._clock()
        self._num_arrivals += 1
        # min: a frontend's wrong clock must not make its request wait for ever, nor break the order.
        has_arrival = math.isfinite(request.arrival_time)
        arrival = min(request.arrival_time, now) if has_arrival else now - request.age_s
        order = (self._scheduler.policy.rank(request), arrival, self._num_arrivals)
        live = Request.from_message(
            request,
            client,
            tenant,
            order,
            self._config.model.max_model_len,
            now,
            self._monotonic(),
            answer_bytes,
        )
        self._requests[live.request_id] = live
        for name in live.options.names:
            self._named.setdefault(name, set()).add(live)
        self._ids_of.setdefault(client, set()).add(live.request_id)
        self.blame.add(live)
        if self.digests.are_wanted:
            self.digests.note(live)
        if live.timeout_at is not None or live.queue_timeout_at is not None:
            self._deadlines.add(live)
        reason = live.find_finish()  # the tokens that it brings may already end it
        if reason is not None:
            self._finish([live], reason)
        elif live.output_token_ids and self._named_aborts.cover(live):
            self._finish([live], FinishReason.ABORT)
        elif self._num_deaths_alone.get(live.request_id, 0) >= FAILURES_ALONE:
            error = f"{FAILURES_ALONE} engine cores died while it ran alone"
            self.failures.convict(live, ErrorCode.POISON_REQUEST, "core death", error)
        return live if live.finish_reason is None else None

    def abort_requests(
        self, client: bytes, request_ids: Iterable[str], names: Collection[str] = (), owns: Owns | None = None
    ) -> None:
        """End this client's requests of these `request_ids` with ABORT; and, whichever client they are of,
        those that `names` names, or whose id it has, if their owner passes `owns` (None: every owner does).
        A named one that is on its way here, with tokens that it has got before, ends when it comes if its
        name is among the first 64.

        What is not live is ignored. Each request's answer goes to its own client.
        """
        by_id = self._ids_of.get(client, set()).intersection(request_ids)
        named = {request for name in names for request in self._named.get(name, ())}
        named |= {self._requests[name] for name in names if name in self._requests}
        aborted = {request for request in named if owns is None or owns(request.options.tenant)}
        aborted |= {self._requests[request_id] for request_id in by_id}
        self._named_aborts.note(names, owns, self._clock())
        self._finish(list(aborted), FinishReason.ABORT)

    def remove_client(self, client: bytes) -> list[str]:
        """End a client's requests without an answer: nobody is there to read it. Returns their ids."""
        request_ids = list(self._ids_of.get(client, ()))
        self._finish([self._requests[request_id] for request_id in request_ids], FinishReason.ABORT)
        self._outputs.forget_client(client)
        self._stats_collector.forget_client(client)
        self._shares.pop(client, None)
        return request_ids

    def next_deadline(self) -> float | None:
        """When `expire` is due, by the monotonic clock; None if no request has a deadline."""
        return self._deadlines.next()

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed at `now`, by the monotonic clock.

        After timeout_s a request ends with ABORT and the tokens it has, also while a step computes it.
        After queue_timeout_s it ends with ERROR and QUEUE_TIMEOUT, unless it was part of a step before.
        """
        while (due := self._deadlines.pop_due(now)) is not None:
            request, is_of_queue = due
            if is_of_queue:
                timeout_s = request.options.queue_timeout_s
                error = f"queue_timeout_s={timeout_s:g}: it waited so long and has not begun"
                self._finish([request], FinishReason.ERROR, error, ErrorCode.QUEUE_TIMEOUT)
            else:
                self._finish([request], FinishReason.ABORT)

    # -- steps

    def next_schedule_at(self) -> float | None:
        """When `schedule` is due although nothing arrives, by the monotonic clock; None if never."""
        schedule_at = None if self.blame.must_wait else self._scheduler.next_schedule_at()
        return find_earliest(schedule_at, self.blame.next_test_at)

    def schedule(self) -> SchedulerOutput | None:
        """The next step for the worker; None if max_steps_in_flight are in flight, if it is too early
        (`next_schedule_at`), or if nothing can run now.
        """
        began = self._clock()
        if self._requests:
            self._window.note(began, is_start=not self._scheduler.in_flight)
        output = None if self.blame.must_wait else self._scheduler.schedule()
        now = self._clock()
        free_time = self._stats_collector.free_time
        if output is not None:
            free_time.note_step(now)
            if self.recorder is not None:
                num_running = len(self._scheduler.running)
                self.recorder.note_schedule(
                    self._scheduler.in_flight[-1], began, now, num_running, len(self._requests)
                )
            self.counters.num_steps += 1
            if output.new_requests:  # the last requests of the step
                for request in self._scheduler.in_flight[-1].requests[-len(output.new_requests) :]:
                    request.scheduled_time = request.scheduled_time or now
        elif self._requests and not self._scheduler.in_flight and self.next_schedule_at() is None:
            free_time.note_free(now)  # live requests make no progress
        self.counters.schedule_s += now - began
        return output

    def update(self, output: ModelRunnerOutput) -> None:
        """Take the result of the oldest step in flight; the result of a forgotten step is ignored.

        Raises ProtocolError if the worker answers a later step, or other rows than the step's.
        """
        if not self._scheduler.batch.is_oldest(output.step_id):
            return
        began = self._clock()
        self._window.note(began, is_start=False)
        step = self._scheduler.complete_step()
        self._observations.observe_step(step.num_scheduled_tokens)
        if output.rows != step.sampled_rows or len(output.token_ids) != len(output.rows):
            raise ProtocolError(f"step {step.step_id} sampled rows {step.sampled_rows}, not {output.rows}")
        if step.pooled:
            _check_pooled(step, output)
        self._scheduler.note_work(step, output)
        logprobs: dict[int, RowLogprobs] = {}
        if output.logprobs:
            logprobs = {entry.row: entry for entry in output.logprobs}
            self._outputs.accept_prompt_logprobs(step, logprobs)
        if output.bad_rows or output.failed_rows:
            self._fail_rows(step, output.bad_rows, output.failed_rows)
        finished = self._outputs.accept_tokens(step, output.token_ids, logprobs, began)
        if step.pooled or output.pooled:
            finished += self._outputs.accept_pooled(step, output.pooled, began)
        self._forget(finished)
        self.failures.note_step()
        now = self._clock()
        self.counters.update_s += now - began
        if self.recorder is not None:
            self.recorder.note_update(step, began, now)

    def take_outputs(self) -> dict[bytes, list[EngineCoreOutput]]:
        """What is to be delivered, per client in order; the next call starts anew."""
        return self._outputs.take()

    # -- looking in

    @property
    def num_in_flight(self) -> int:
        """Steps that were handed out and are not answered."""
        return len(self._scheduler.in_flight)

    @property
    def num_unfinished(self) -> int:
        """Live requests."""
        return len(self._requests)

    def stats(self, num_clients: int | None = None) -> SchedulerStats:
        """The counts of this moment. `num_clients`: attached clients; None: those with live requests."""
        count = len(self._ids_of) if num_clients is None else num_clients
        return self._stats_collector.stats(count, self._clock())

    def snapshot(self, process: CoreProcessInfo) -> EngineSnapshot:
        """What live views show."""
        return self._stats_collector.snapshot(process, self._ids_of, self._clock())

    def history(self) -> EngineHistory:
        """What charts show."""
        return self._stats_collector.history.look(self._clock(), self._pool.num_blocks)

    def metrics(self, num_clients: int | None = None) -> EngineMetrics:
        """Everything that was counted since the start; `num_clients` as for `stats`."""
        return self._stats_collector.metrics(self.stats(num_clients))

    def count_served(self, client: bytes) -> int:
        """Tokens of a client's requests that have ended."""
        return self._stats_collector.count_served(client)

    def add_counts(self, counts: FrontendCounts) -> None:
        """Add a frontend's counts to `metrics`."""
        self._observations.tool_parse_errors_total += counts.num_tool_parse_errors
        self._observations.reasoning_tokens_total += counts.num_reasoning_tokens

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, with nothing changed, while requests hold blocks."""
        if self._pool.num_free < self._pool.num_blocks or self._scheduler.running:
            return False
        self._manager.forget_all()
        return True

    def check_integrity(self) -> list[str]:
        """The problems with blocks, rows and requests. Walks all of them."""
        scheduler = self._scheduler
        live = [*scheduler.running, *scheduler.waiting, *scheduler.policy.parked]
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

    def _fail_rows(self, step: Step, bad_rows: list[int], failures: list[RowFailure]) -> None:
        """End requests whose logits or vector are not finite, and those that exceed a limit of the worker."""
        rows = zip(step.rows, step.requests, strict=True)
        pooled = drop_finished(request for row, request in rows if row in bad_rows and request.pooling_params)
        bad = list(_find_live(step, bad_rows))
        for request in bad + pooled:
            self._manager.forget_contents(request)  # their K and V may be bad: nobody finds them again
        self._finish(bad, FinishReason.ERROR, BAD_LOGITS, ErrorCode.BAD_LOGITS)
        self._finish(pooled, FinishReason.ERROR, BAD_VECTOR, ErrorCode.BAD_VECTOR)
        by_row = {failure.row: failure for failure in failures}
        for request, row in _find_live(step, by_row).items():
            code = ErrorCode.POISON_REQUEST if by_row[row].is_poison else ErrorCode.BAD_GRAMMAR
            self._finish([request], FinishReason.ERROR, by_row[row].reason, code)

    def _answer_refused(self, client: bytes, request: EngineCoreRequest, error: str, code: ErrorCode) -> None:
        """Answer a request that was not admitted."""
        self._observations.observe_refusal()
        self.request_log.note(f"request {code}", f"{request.request_id!r}: {error}")
        start = count_token_ids(request.output_token_ids)
        end = FinishReason.ERROR
        output = EngineCoreOutput(request.request_id, start, [], end, error=error, error_code=code)
        self._outputs.add(client, output)

    def _finish(
        self,
        requests: list[Request],
        reason: FinishReason,
        error: str | None = None,
        code: ErrorCode | None = None,
    ) -> None:
        """End live requests without another token, and answer each."""
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
            self._outputs.add(request.client, output)
        self._forget(requests)

    def _forget(self, finished: list[Request]) -> None:
        """Drop requests that have their finish_reason and their last output."""
        if not finished:
            return
        self._scheduler.finish(finished)
        self.blame.note_progress()
        for request in finished:
            self._stats_collector.note_end(request)
            del self._requests[request.request_id]
            for name in set(request.options.names):
                self._named[name].remove(request)
                if not self._named[name]:
                    del self._named[name]
            self._tenants.leave(request.tenant, request.held_bytes)
            client_ids = self._ids_of[request.client]
            client_ids.discard(request.request_id)
            if not client_ids:
                del self._ids_of[request.client]


def _check_pooled(step: Step, output: ModelRunnerOutput) -> None:
    """Raise ProtocolError unless each pooled row has its vector, or has failed."""
    answered = {entry.row for entry in output.pooled}.union(output.bad_rows)
    if not answered.issuperset(step.pooled_rows):
        raise ProtocolError(f"step {step.step_id} pooled rows {step.pooled_rows}, not {sorted(answered)}")


def _find_live(step: Step, rows: Collection[int]) -> dict[Request, int]:
    """The step's requests that sampled in `rows` and have not ended, each with one such row."""
    sampled = zip(step.sampled_rows, step.sampled, strict=True)
    return {request: row for row, request in sampled if row in rows and request.finish_reason is None}
