"""Policy: decides which requests run next. The scheduler asks it, and notifies it of what happens.

A policy orders the waiting requests, chooses which requests decode and which are preempted, and keeps its
state in itself and in `policy_data` of requests and steps. It reads the running batch and changes nothing but
its own state; the scheduler carries its decisions out. The default is first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from ...ipc.protocol.messages import EngineCoreRequest
from ..scheduling.request import Request
from ..scheduling.request_queue import WaitingRequests
from ..scheduling.running_batch import RunningBatch
from ..scheduling.step import Step

QueueT = TypeVar("QueueT", bound=WaitingRequests)


class Policy(Generic[QueueT]):
    """The queue, a step's decisions, and hooks for what happens."""

    make_queue: Callable[[], QueueT]  # makes an empty queue, whose `peek` is the next request
    shares_bounds = False  # whether a tenant may fill its part of the queue though others have filled it

    def __init__(self, batch: RunningBatch, monotonic: Callable[[], float]) -> None:
        """`monotonic`: the clock by which steps are timed."""
        self.batch = batch
        self.monotonic = monotonic
        self.waiting = self.make_queue()
        self.parked = self.make_queue()  # requests that may not run now
        self._cohort: frozenset[Request] | None = None
        self._held: set[Request] = set()

    # -- the waiting requests

    def rank(self, request: EngineCoreRequest) -> int:
        """The first part of `Request.order`: the least runs first and is preempted last; then by arrival.

        Called once, when the request comes. Its token ids are packed: `ipc/protocol/token_ids.py`.
        """
        del request
        return 0

    def add(self, request: Request) -> None:
        """Let a request wait that is new or was preempted."""
        (self.parked if self.is_parked(request) else self.waiting).add(request)

    def remove(self, request: Request) -> None:
        """Take out a waiting request."""
        (self.parked if self.is_parked(request) else self.waiting).remove(request)

    def run_only(self, cohort: Sequence[Request]) -> None:
        """Let only the cohort run, until `run_all`; requests that come meanwhile wait, too.

        Called when nothing runs. Its cost grows with this cohort and the one before, not with the queue.
        """
        assert not self.batch.requests, "a cohort begins when nothing runs"
        self.run_all()
        self.waiting, self.parked = self.parked, self.waiting
        for request in cohort:
            self.parked.remove(request)
            self.waiting.add(request)
        self._cohort = frozenset(cohort)

    def run_all_but(self, held: Sequence[Request]) -> bool:
        """Let all requests run except `held`, until `run_all` or `run_only`. False if there are no others.

        Called when nothing runs, so each of `held` waits.
        """
        assert not self.batch.requests, "requests are held when nothing runs"
        self.run_all()
        for request in held:
            self.waiting.remove(request)
            self.parked.add(request)
        self._held = set(held)
        return bool(self.waiting)

    def hold(self, request: Request) -> None:
        """Add a request to those that `run_all_but` holds, before `add`."""
        self._held.add(request)

    def run_all(self) -> None:
        """End `run_only` or `run_all_but`."""
        self._cohort = None
        self._held = set()
        if len(self.parked) > len(self.waiting):
            self.waiting, self.parked = self.parked, self.waiting
        for request in self.parked:
            self.waiting.add(request)
        self.parked = self.make_queue()

    def is_parked(self, request: Request) -> bool:
        """Whether a live request is kept from running by `run_only` or `run_all_but`."""
        return request in self._held or (self._cohort is not None and request not in self._cohort)

    # -- decisions for a step

    def next_schedule_at(self) -> float | None:
        """When the next step may be formed, by the monotonic clock; None: at once."""
        return None

    def choose_victims(self) -> Iterator[Request]:
        """The running requests to preempt before a step is formed.

        Each is preempted before the next one is drawn. A decode that still lacks a block takes it from the
        last running request.
        """
        return iter(())

    def choose_decodes(self, step: Step) -> list[Request]:
        """The running requests, without those whose decode is left for later. Callers do not change it."""
        del step
        return self.batch.requests

    def is_exclusive(self, step: Step) -> bool:
        """Whether the step leaves out decodes for other requests. The next one does not."""
        del step
        return False

    def choose_prompts(self, step: Step, prefills: list[Request]) -> Iterator[Request]:
        """The requests whose prompts get the rest of the step: running ones, of `prefills`, or waiting ones.

        Each gets its chunk, or is admitted, before the next one is drawn; `row` says whether a waiting one
        was admitted. Here strictly in order: no request overtakes one that does not fit.
        """
        yield from prefills
        while step.token_budget and self.batch.has_free_row:
            head = self.waiting.peek()
            if head is None:
                return
            yield head
            if head.row is None:
                return

    def limit_chunk(self, step: Step, request: Request, num_tokens: int) -> int:
        """How many of the `num_tokens` tokens of a prompt, which fit, may be in this step."""
        del step, request
        return num_tokens

    # -- notifications

    def note_enter(self, step: Step, request: Request) -> None:
        """A waiting request was admitted in this step."""

    def note_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        """`num_tokens` tokens of a prompt were put into the step; `num_computed_tokens` counts them."""

    def note_blocks(self, request: Request, num_more: int) -> None:
        """A running request has so many more blocks than before, or fewer."""

    def note_work(self, request: Request, num_tokens: float) -> None:
        """Its rows' own work in a step took as long as `num_tokens` tokens of that step."""

    def note_held(self, requests: Sequence[Request]) -> None:
        """They could have decoded in a step, and were left out because they take long."""

    def note_launch(self, step: Step) -> None:
        """The step is formed and goes to the worker."""

    def note_complete(self, step: Step) -> None:
        """The result of the oldest step has come. None comes for steps that are lost with a worker."""

    def note_release(self, request: Request) -> None:
        """A running request is about to lose its row and its blocks: it ends or is preempted."""

    def note_finish(self, request: Request) -> None:
        """A request has ended, whether it ran or waited."""

    # -- inspection

    def why_waiting(self, request: Request) -> str:
        """Why a waiting request does not run, in words. Costs no more than one look at the queue."""
        head = self.waiting.peek()
        if head is None or head is request:
            return self.why_head_waits(request)
        return f"behind earlier requests; the first of them: {self.why_head_waits(head)}"

    def why_head_waits(self, head: Request) -> str:
        """Why the next request has not begun."""
        batch = self.batch
        if head.num_placeholders:
            return "preempted, and a token of it is still on its way"
        if not batch.free_rows:
            return f"no free row ({len(batch.requests)} running, max_num_seqs={batch.config.max_num_seqs})"
        hit = batch.manager.find_prefix(head)
        if batch.lacks_blocks(head, hit):
            num_needed, num_kept = batch.manager.count_taken(head, hit), batch.num_reserved_blocks
            kept = f", {num_kept} of them kept for running requests" if num_kept else ""
            return f"needs {num_needed:,} KV blocks, {batch.manager.pool.num_free:,} are free{kept}"
        if batch.in_flight and batch.in_flight[-1].token_budget == 0:
            return f"token budget of the step is spent ({batch.max_step_tokens})"
        return "for the next step"

    def check(self) -> list[str]:
        """The problems found in the policy's state and the queue."""
        waiting = list(self.waiting)
        if len(waiting) != len(self.waiting):
            return [f"{len(self.waiting)} waiting requests counted, {len(waiting)} found"]
        return []
