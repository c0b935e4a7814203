"""StepWatch: what a worker owes the core, as the deadline of its ChildWatch. Pure: time is passed in.

Ranks owe together: what rank 0 answers, all have done.

A step's time runs from when it was sent, or from the answer before it, whichever is later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...ipc.processes.liveness import Deadline
from ...ipc.step import ModelRunnerOutput, StepFailed, WorkerFailed, WorkerReady


class StepWatch:
    """Sets the deadline of a worker, of each of its ranks, to that of the oldest thing that it owes."""

    def __init__(self, deadlines: Sequence[Deadline], step_timeout_s: float) -> None:
        """`step_timeout_s` 0 sets no deadline."""
        self._deadlines = deadlines
        self._step_timeout_s = step_timeout_s
        self._overdue = f"took longer than step_timeout_s={step_timeout_s:g}"
        self._steps: deque[int] = deque()

    def begin_start(self, ready_timeout_s: float, now: float) -> None:
        """The worker was started; it is to become ready."""
        if self._step_timeout_s:
            self._set(now, ready_timeout_s, f"it was not ready within {ready_timeout_s:g} s")

    def add_step(self, step_id: int, now: float) -> None:
        """A step was sent."""
        self._steps.append(step_id)
        if len(self._steps) == 1:
            self._expect_step(now)

    def forget_steps(self) -> None:
        """The worker need not answer what was sent up to now."""
        self._steps.clear()
        self._clear()

    def note(self, event: object, now: float) -> None:
        """It has said something."""
        match event:
            case ModelRunnerOutput() | StepFailed():
                if self._steps and event.step_id == self._steps[0]:
                    self._steps.popleft()
                    self._expect_step(now)
            case WorkerReady() | WorkerFailed():
                self._clear()
            case _:
                pass

    def _expect_step(self, now: float) -> None:
        """The oldest step's answer, if one is awaited."""
        if self._steps and self._step_timeout_s:
            self._set(now, self._step_timeout_s, f"step {self._steps[0]} {self._overdue}")
        else:
            self._clear()

    def _set(self, now: float, limit_s: float, otherwise: str) -> None:
        for deadline in self._deadlines:
            deadline.set(now, limit_s, otherwise)

    def _clear(self) -> None:
        for deadline in self._deadlines:
            deadline.clear()
