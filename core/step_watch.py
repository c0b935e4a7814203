"""StepWatch: what a worker owes the core, and since when. Pure: time is passed in.

A step's time runs from when it was sent, or from the answer before it, whichever is later. A worker that
owes something is looked at meanwhile: one that is stopped will not answer, and need not be waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..ipc.step import ModelRunnerOutput, StepFailed, WorkerFailed, WorkerReady

LOOK_INTERVAL_S = 0.5
MAX_LOOKS_STOPPED = 3  # in a row: it is given up within 2 s, and may be stopped and continued for a second


class StepWatch:
    """The deadline of the oldest thing that a worker owes. Times are of the monotonic clock."""

    def __init__(self, step_timeout_s: float, ready_timeout_s: float) -> None:
        """`step_timeout_s` 0 watches nothing."""
        self._step_timeout_s = step_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._steps: deque[int] = deque()
        self._awaited = ""
        self.due_at: float | None = None  # None: it owes nothing
        self._look_at = 0.0
        self._num_looks_stopped = 0

    @property
    def next_check_at(self) -> float | None:
        """When `find_overdue` has something to do, None while nothing is owed."""
        return None if self.due_at is None else min(self.due_at, self._look_at)

    def begin_start(self, now: float) -> None:
        """A worker was started; it is to become ready."""
        self._steps.clear()
        self._await(now, self._ready_timeout_s, f"it was not ready within {self._ready_timeout_s:g} s")

    def add_step(self, step_id: int, now: float) -> None:
        """A step was sent."""
        self._steps.append(step_id)
        if len(self._steps) == 1:
            self._await_step(now)

    def forget_steps(self) -> None:
        """The worker need not answer what was sent up to now, or it is gone."""
        self._steps.clear()
        self.due_at = None

    def note(self, event: object, now: float) -> None:
        """It has said something."""
        match event:
            case ModelRunnerOutput(step_id=step_id) | StepFailed(step_id=step_id):
                if self._steps and self._steps[0] == step_id:
                    self._steps.popleft()
                    self.due_at = None
                    if self._steps:
                        self._await_step(now)
            case WorkerReady() | WorkerFailed():
                self.due_at = None
            case _:
                pass

    def find_overdue(self, now: float, is_stopped: Callable[[], bool]) -> str | None:
        """Why the worker is to be given up, once; None if it is not. `is_stopped` is asked only when due."""
        if self.due_at is None:
            return None
        if now >= self.due_at:
            self.due_at = None
            return self._awaited
        if now >= self._look_at:
            self._look_at = now + LOOK_INTERVAL_S
            self._num_looks_stopped = self._num_looks_stopped + 1 if is_stopped() else 0
            if self._num_looks_stopped == MAX_LOOKS_STOPPED:
                self.due_at = None
                return "it is stopped"
        return None

    def _await_step(self, now: float) -> None:
        limit_s = self._step_timeout_s
        self._await(now, limit_s, f"step {self._steps[0]} took longer than step_timeout_s={limit_s:g}")

    def _await(self, now: float, limit_s: float, otherwise: str) -> None:
        if self._step_timeout_s:
            self.due_at = now + limit_s
            self._look_at = now + LOOK_INTERVAL_S
            self._num_looks_stopped = 0
            self._awaited = otherwise
