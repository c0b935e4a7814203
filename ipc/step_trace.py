"""What an engine core notes of its steps while somebody profiles it: counts, times, no requests."""

from __future__ import annotations

import msgspec

MAX_TRACED_STEPS = 50_000  # of a profile: 3 MB on the wire


class TracedStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step. Times are of the core's wall clock, in seconds."""

    step_id: int
    schedule_at: float  # the core began to decide what is in it
    submitted_at: float  # it was on its way to the worker
    answered_at: float  # the core had the worker's answer
    updated_at: float  # and had taken it in
    num_tokens: int  # computed in it
    num_rows: int  # requests in it
    num_sampled: int  # rows that a token was sampled for
    num_running: int  # requests when it was scheduled
    num_waiting: int  # likewise


class StepTrace(msgspec.Struct, array_like=True, frozen=True):
    """A profile's steps in the order of their answers; those beyond MAX_TRACED_STEPS are only counted."""

    steps: list[TracedStep]
    num_dropped: int = 0
