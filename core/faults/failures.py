"""Failures: what follows when a step fails or a worker is lost: which requests run again, and which end.

Blame says which request was the cause, StepLimits how large steps may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from ...ipc.protocol.messages import ErrorCode, FinishReason
from ...ipc.protocol.step import StepFailed
from ...ipc.spec.config import SchedulerConfig
from ..scheduling.request import Request, drop_finished
from ..scheduling.scheduler import Scheduler
from .blame import Blame, WorkerDeath

FIRST_PATIENCE, MAX_PATIENCE = 16, 1024  # good steps before the limits are doubled
ATTEMPTS_AT_FLOOR = 2  # at a step that cannot be made smaller


class StepLimits:
    """How much a step may hold: at first as configured, less after the device's memory did not suffice.

    Such a step is halved and run again, and no request fails for it. After some good steps the limits are
    doubled. A shortage after that doubles how many good steps it takes, so that a batch which never fits is
    tried ever more rarely. Rows are never more than tokens. Pure.
    """

    def __init__(self, max_tokens: int, max_rows: int, *, can_split: bool) -> None:
        """`can_split`: whether a prompt may be computed in chunks; if not, only rows are limited."""
        self._most_tokens, self._most_rows = max_tokens, max_rows
        self._can_split = can_split
        self.max_tokens, self.max_rows = max_tokens, max_rows
        self._patience = FIRST_PATIENCE
        self._has_grown = False  # since the last shortage
        self._num_good_steps = 0
        self._num_failures_at_floor = 0

    def shrink(self, num_tokens: int, num_rows: int) -> bool:
        """A step of this size ran out of memory. True: run its requests again, within the new limits.

        False: the step held one token of one request, and has failed before.
        """
        self._num_good_steps = 0
        if self._has_grown:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
            self._has_grown = False
        if num_rows == 1 and (num_tokens == 1 or not self._can_split):
            self._num_failures_at_floor += 1
            self.max_rows = 1
            return self._num_failures_at_floor < ATTEMPTS_AT_FLOOR
        if self._can_split:
            self.max_tokens = max(1, min(self.max_tokens, num_tokens) // 2)
        num_rows_now = max(1, num_rows // 2) if num_rows > 1 else self.max_rows
        self.max_rows = min(self.max_rows, num_rows_now, self.max_tokens)
        return True

    @property
    def is_at_floor(self) -> bool:
        """Whether a step that cannot be made smaller has failed, and its request has not ended for it."""
        return self._num_failures_at_floor > 0

    def forget_failures(self) -> None:
        """The request that was alone in the smallest step has got a token, or has ended."""
        self._num_failures_at_floor = 0

    def note_success(self) -> bool:
        """A step went well. True when the limits have grown."""
        is_full = self.max_tokens == self._most_tokens and self.max_rows == self._most_rows
        if is_full and self._patience == FIRST_PATIENCE:
            return False
        self._num_good_steps += 1
        if self._num_good_steps < self._patience:
            return False
        self._num_good_steps = 0
        if is_full:
            self._patience, self._has_grown = FIRST_PATIENCE, False
            return False
        self._has_grown = True
        self.max_tokens = min(2 * self.max_tokens, self._most_tokens)
        is_full = self.max_tokens == self._most_tokens
        self.max_rows = min(2 * self.max_rows, self._most_rows if is_full else self.max_tokens)
        return True


FoundBy = Literal["step", "worker death", "core death"]


class PoisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is logged about a request that was found to make steps, workers or cores fail.

    Ids and numbers only: no text of a prompt, no token, nothing that an exception says beyond its class.
    """

    request_id: str
    client: str  # identity in hex
    code: str  # of the error that it ended with
    found_by: FoundBy
    cause: str  # class of the exception, or how the process ended
    step_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    max_total_tokens: int
    num_preemptions: int
    num_attempts: int  # engine cores that were lost with it


FinishRequests = Callable[[list[Request], FinishReason, str, ErrorCode], None]


class Failures:
    """Handles each kind of failure for the engine core."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler, blame: Blame, finish: FinishRequests):
        """`finish` ends live requests and answers each."""
        self._scheduler = scheduler
        self._blame = blame
        self._finish = finish
        self._limits = StepLimits(
            config.max_num_batched_tokens, config.max_num_seqs, can_split=config.enable_chunked_prefill
        )
        self._at_floor: tuple[Request, int] | None = None  # what failed alone for memory, and its tokens then
        self._poison_reports: list[PoisonReport] = []

    @property
    def step_limits(self) -> tuple[int, int]:
        """The most tokens and the most requests of a step; fewer than configured after a shortage."""
        return self._limits.max_tokens, self._limits.max_rows

    def take_poison_reports(self) -> list[PoisonReport]:
        """The requests that were convicted since the last call."""
        reports, self._poison_reports = self._poison_reports, []
        return reports

    def note_step(self) -> None:
        """A step went well, and its tokens were accepted."""
        self._blame.note_step()
        if self._at_floor is not None:
            request, num_known = self._at_floor
            if request.finish_reason is not None or request.num_output_tokens > num_known:
                self._forget_floor()
        if self._limits.note_success():
            self._scheduler.batch.limit_steps(*self.step_limits)

    def fail_step(self, failed: StepFailed) -> bool:
        """The oldest step raised: every request waits to be computed again, and Blame looks for the culprit.

        A request that fails alone ends with the cause. After a step that was too large for the memory, steps
        are smaller for a while. False: the step was forgotten after an earlier failure, and nothing is done.
        """
        if not self._scheduler.batch.is_oldest(failed.step_id):
            return False
        if failed.is_out_of_memory:
            self._shrink_steps(failed)
            return True
        culprit = self._blame.take_failure(drop_finished(self._scheduler.in_flight[0].requests))
        if culprit is not None:
            self.convict(culprit, ErrorCode.POISON_REQUEST, "step", failed.error, failed.step_id)
        return True

    def lose_worker(
        self, reason: str, *, is_overdue: bool = False, is_last_allowed: bool = False
    ) -> WorkerDeath:
        """The worker was lost: its rows, steps and cache are gone, and every request waits again.

        A request that was alone at several deaths ends with `reason`. `is_overdue`: the worker's oldest step
        took longer than a step may. `is_last_allowed`: one more death that nothing explains ends the engine,
        so the requests of this one's steps are suspects at once.
        """
        steps = self._scheduler.in_flight
        in_flight = {request.request_id: request for step in steps for request in step.requests}
        accused: list[Request] = []
        if is_overdue and steps:
            accused = steps[0].requests
        elif is_last_allowed:
            accused = list(in_flight.values())
        was_searching = self._blame.is_searching or self._blame.explains(accused)
        culprit = self._blame.take_death(drop_finished(in_flight.values()), accused)
        self._scheduler.batch.manager.forget_all()
        if culprit is not None:
            self.convict(culprit, ErrorCode.POISON_REQUEST, "worker death", reason)
        if not self._blame.explains_deaths:
            return WorkerDeath.UNEXPLAINED
        if culprit is not None:
            return WorkerDeath.CONVICTED
        return WorkerDeath.SEARCHED if was_searching else WorkerDeath.UNEXPLAINED

    def convict(
        self, request: Request, code: ErrorCode, found_by: FoundBy, error: str, step_id: int | None = None
    ) -> None:
        """End a request that is the cause of a failure, and report it."""
        self._poison_reports.append(
            PoisonReport(
                request_id=request.request_id,
                client=request.client.hex(),
                code=str(code),
                found_by=found_by,
                cause=error.partition(":")[0],
                step_id=step_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                max_total_tokens=request.max_total_tokens,
                num_preemptions=request.num_preemptions,
                num_attempts=request.num_attempts,
            )
        )
        self._finish([request], FinishReason.ERROR, error, code)

    def _shrink_steps(self, failed: StepFailed) -> None:
        """A step ran out of memory: make steps smaller. A request that is too large alone ends."""
        step, limits = self._scheduler.in_flight[0], self._limits
        requests = drop_finished(step.requests)
        if self._at_floor is not None and requests != [self._at_floor[0]]:
            self._forget_floor()
        may_retry = limits.shrink(step.num_scheduled_tokens, len(step.rows))
        self._blame.take_shortage()
        self._scheduler.batch.limit_steps(*self.step_limits)
        if limits.is_at_floor and requests:
            self._at_floor = requests[0], requests[0].num_output_tokens
        else:
            self._forget_floor()
        if not may_retry:
            self._forget_floor()
            for request in requests:
                self.convict(request, ErrorCode.OUT_OF_MEMORY, "step", failed.error, failed.step_id)

    def _forget_floor(self) -> None:
        self._at_floor = None
        self._limits.forget_failures()
