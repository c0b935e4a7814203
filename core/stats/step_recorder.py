"""StepRecorder: what a core notes of its steps while it is profiled. There is none at any other time."""

from __future__ import annotations

from ...ipc.protocol.engine_views import MAX_TRACED_STEPS, StepTrace, TracedStep
from ..scheduling.step import Step


class StepRecorder:
    """Told of each step twice; steps whose answer never came are in no trace."""

    def __init__(self, max_steps: int = MAX_TRACED_STEPS) -> None:
        self._max_steps = max_steps
        self._submitted: dict[int, tuple[float, float, int, int]] = {}
        self._steps: list[TracedStep] = []
        self._num_dropped = 0

    def note_schedule(self, step: Step, began: float, ended: float, num_running: int, num_live: int) -> None:
        """A step was scheduled from `began` to `ended`."""
        self._submitted[step.step_id] = (began, ended, num_running, num_live - num_running)

    def note_update(self, step: Step, began: float, ended: float) -> None:
        """Its answer was taken in from `began` to `ended`."""
        submitted = self._submitted.pop(step.step_id, None)
        if submitted is None:  # it was scheduled before the profile began
            return
        for lost in [step_id for step_id in self._submitted if step_id < step.step_id]:
            del self._submitted[lost]
        if len(self._steps) == self._max_steps:
            self._num_dropped += 1
            return
        schedule_at, submitted_at, num_running, num_waiting = submitted
        self._steps.append(
            TracedStep(
                step.step_id,
                schedule_at,
                submitted_at,
                began,
                ended,
                step.num_scheduled_tokens,
                len(step.rows),
                len(step.sampled_rows),
                num_running,
                num_waiting,
            )
        )

    def make_trace(self) -> StepTrace:
        """What has been noted."""
        return StepTrace(self._steps, self._num_dropped)
