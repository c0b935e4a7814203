"""Policy: what the scheduler asks and tells the part that says who runs next.

A policy orders the waiting requests, chooses who decodes and who gives way, and keeps what it has to remember
for that in itself and in `policy_data` of requests and steps. It looks at the running batch and changes
nothing but its own state; the scheduler does what it says. By default the first to come runs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from ...ipc.protocol.fair_share import has_room
from ...ipc.protocol.messages import EngineCoreRequest
from ..scheduling.request import Request
from ..scheduling.request_queue import WaitingRequests
from ..scheduling.running_batch import RunningBatch
from ..scheduling.step import Step

QueueT = TypeVar("QueueT", bound=WaitingRequests)


class Policy(Generic[QueueT]):
    """The queue, the decisions of a step, and hooks that are told what has happened."""

    make_queue: Callable[[], QueueT]  # an empty queue, whose `peek` is who is next

    def __init__(self, batch: RunningBatch, monotonic: Callable[[], float]) -> None:
        """`monotonic`: the clock that steps are timed by."""
        self.batch = batch
        self.monotonic = monotonic
        self.waiting = self.make_queue()
        self.parked = self.make_queue()  # those that may not run now
        self._cohort: frozenset[Request] | None = None
        self._held: set[Request] = set()

    # -- who waits

    def rank(self, request: EngineCoreRequest) -> int:
        """The first part of `Request.order`: the least runs first and is preempted last; then by arrival.

        Asked once, when the request comes. Its token ids are packed: `ipc.token_ids.count_token_ids`.
        """
        del request
        return 0

    def admits(self, asked: float, taken: float, own: float, bound: float, part: float) -> bool:
        """Whether one more request may wait, which takes `asked` places or bytes of `bound`.

        `taken` of it are in use, `own` of them by its tenant, whose weight is `part` of all active tenants'.
        """
        del part
        return has_room(asked, taken, own, bound, 0.0)

    def add(self, request: Request) -> None:
        """Let a request wait that is new or was preempted."""
        (self.parked if self.is_parked(request) else self.waiting).add(request)

    def remove(self, request: Request) -> None:
        """Take out a request that waits."""
        (self.parked if self.is_parked(request) else self.waiting).remove(request)

    def run_only(self, cohort: Sequence[Request]) -> None:
        """Let only these run of all requests, until `run_all`; others that come meanwhile wait too.

        Called when nothing runs. Costs as much as there are requests in this cohort and the one before.
        """
        assert not self.batch.requests, "a cohort begins when nothing runs"
        self.run_all()
        self.waiting, self.parked = self.parked, self.waiting
        for request in cohort:
            self.parked.remove(request)
            self.waiting.add(request)
        self._cohort = frozenset(cohort)

    def run_all_but(self, held: Sequence[Request]) -> bool:
        """Let all requests run but these, until `run_all` or `run_only`. False if there are no others.

        Called when nothing runs; each of them waits.
        """
        assert not self.batch.requests, "requests are held when nothing runs"
        self.run_all()
        for request in held:
            self.waiting.remove(request)
            self.parked.add(request)
        self._held = set(held)
        return bool(self.waiting)

    def hold(self, request: Request) -> None:
        """A further one, which is not added yet."""
        self._held.add(request)

    def run_all(self) -> None:
        """End what `run_only` or `run_all_but` began."""
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

    # -- what a step is to hold

    def next_schedule_at(self) -> float | None:
        """When the next step may be formed, by the monotonic clock; None for at once."""
        return None

    def choose_victims(self) -> Iterator[Request]:
        """The running requests that make room before a step is formed.

        Each is preempted before the next one is asked for. A decode that lacks a block after all takes it
        from the last running request.
        """
        return iter(())

    def choose_decodes(self, step: Step) -> list[Request]:
        """The running requests, without those whose decode is not for this step. Not to be changed."""
        del step
        return self.batch.requests

    def is_exclusive(self, step: Step) -> bool:
        """Whether decodes were left out of it for others; of the next one they are not."""
        del step
        return False

    def choose_prompts(self, step: Step, prefills: list[Request]) -> Iterator[Request]:
        """Whose prompts get what is left of the step: of `prefills`, which run, or waiting ones.

        Each gets its part, or is admitted, before the next one is asked for; `row` tells whether a waiting
        one was admitted. Here strictly in order: what does not fit is not overtaken.
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
        """How many of the `num_tokens` tokens of a prompt or a beam, which fit, may be in this step."""
        del step, request
        return num_tokens

    # -- what has happened

    def note_enter(self, step: Step, request: Request) -> None:
        """A waiting request was admitted, and begins in this step."""

    def note_chunk(self, step: Step, request: Request, num_tokens: int) -> None:
        """So many tokens of a prompt were entered in the step; `num_computed_tokens` counts them."""

    def note_block(self, request: Request, count: int = 1) -> None:
        """A running request was given so many more blocks; less than 0: has so many less."""

    def note_beams(self, request: Request, num_tokens: int, step: Step | None = None) -> None:
        """So many tokens of its beams were entered in the step; without one, have been computed in vain."""

    def note_work(self, request: Request, num_tokens: float) -> None:
        """What its rows did for themselves in a step took as long as so many tokens of that step."""

    def note_held(self, requests: Sequence[Request]) -> None:
        """They could decode in a step, and were left out of it for the time that they would take."""

    def note_launch(self, step: Step) -> None:
        """The step is formed and goes to the worker."""

    def note_complete(self, step: Step) -> None:
        """The result of the oldest step has come. Of steps that are lost with the worker none comes."""

    def note_release(self, request: Request) -> None:
        """A running request is about to lose its row and its blocks, as it ends or is preempted."""

    def note_finish(self, request: Request) -> None:
        """A request has ended, wherever it was."""

    # -- looking in

    def why_waiting(self, request: Request) -> str:
        """Why a request that waits does not run, for a person. Costs no more than one look at the queue."""
        head = self.waiting.peek()
        if head is None or head is request:
            return self.why_head_waits(request)
        return f"behind earlier requests; the first of them: {self.why_head_waits(head)}"

    def why_head_waits(self, head: Request) -> str:
        """Why the request that is next has not begun."""
        batch = self.batch
        if head.num_placeholders:
            return "preempted, and a token of it is still on its way"
        if batch.lacks_rows(head):
            lacks = f"needs {head.num_rows} rows" if head.num_rows > 1 else "no free row"
            return f"{lacks} ({len(batch.requests)} running, max_num_seqs={batch.config.max_num_seqs})"
        hits = batch.manager.find_prefix(head)
        if batch.lacks_blocks(head, hits):
            num_needed, num_kept = batch.manager.count_taken(head, hits), batch.num_reserved_blocks
            kept = f", {num_kept} of them kept for running requests" if num_kept else ""
            return f"needs {num_needed:,} KV blocks, {batch.manager.pool.num_free:,} are free{kept}"
        if batch.in_flight and batch.in_flight[-1].token_budget == 0:
            return f"token budget of the step is spent ({batch.max_step_tokens})"
        return "for the next step"

    def check(self) -> list[str]:
        """What is wrong with the policy's own books, and with the queue's; empty if nothing is."""
        waiting = list(self.waiting)
        if len(waiting) != len(self.waiting):
            return [f"{len(self.waiting)} waiting requests counted, {len(waiting)} found"]
        return []
