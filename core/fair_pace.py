"""Pace: how long steps last, and what that allows tenants with more than their share while newcomers come.

A newcomer is a request with a prompt to compute whose tenant holds few rows beside another's many. It waits
for what is left of the running step, so steps are kept as long as newcomers' own first steps are: the tokens
of tenants in excess are limited to what lasts that long. And the step ahead is put together only shortly
before the running one ends, so that a newcomer misses that one at most. Both end WINDOW_S after the last
newcomer; without newcomers nothing is limited and nothing is late.

It knows durations, tokens and rows held; not requests, blocks or the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from .scheduler import Step
from .tenant import Tenant

WINDOW_S = 10.0  # how long a newcomer's tenant is expected back
SUBMIT_MARGIN_S = 0.002  # of the step ahead: a poll's rounding (1 ms), scheduling, the way to the worker
EXCESS = 2.0  # times the rows, over its weight, that the newcomer's tenant holds with it
MAX_TURNS = 8  # limited steps until each decode of tenants in excess had its turn; twice that beside prompts
STRETCH = 1.25  # how long a step may last, in first steps of newcomers
_MAX_CHANGE = 2.0  # a factor; a step that took longer was held up by something else
# Weights of the newest step in what is expected. That it took less counts more: a step ahead that comes late
# leaves the worker idle.
_SMOOTHING = 0.25
_SMOOTHING_LONGER = 0.1


class Pace:
    """Durations come from `clock`; the scheduler says what each step is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended_at = clock()  # of the step whose result came last
        self._newcomer: Tenant | None = None  # the tenant of the last one
        self._newcomer_at = 0.0
        self._first_step_s: float | None = None  # expected of a step that a newcomer has for itself
        self._limit: float | None = None  # tokens of tenants in excess that last as long
        self._durations: dict[tuple[int, int], float] = {}  # by size of step; about 200 sizes at most

    # -- who is in excess

    def note_newcomer(self, tenant: Tenant) -> None:
        """A prompt of this tenant is about to be computed beside tenants in excess."""
        self._newcomer, self._newcomer_at = tenant, self._clock()

    def find_newcomer(self) -> Tenant | None:
        """The tenant of the last newcomer, None if that is too long ago to reckon with the next."""
        if self._newcomer is not None and self._clock() - self._newcomer_at > WINDOW_S:
            self._newcomer = None
        return self._newcomer

    # -- what a step may hold

    def limit_tokens(self, num_decodes: int) -> int | None:
        """Tokens of tenants in excess, who have so many decodes, for the next step; None for any number."""
        if self._limit is None:
            return None
        return max(1, round(self._limit), ceil(num_decodes / MAX_TURNS))

    def find_submit_time(self, running: Step) -> float | None:
        """When the step after `running` is to be put together; None for at once."""
        if self.find_newcomer() is None:
            return None
        duration_s = self._durations.get(_size_of(running))
        return None if duration_s is None else self._began_at(running) + duration_s - SUBMIT_MARGIN_S

    # -- what steps were

    def note_launch(self, step: Step) -> None:
        """A step was put together and goes to the worker."""
        step.launched_at = self._clock()

    def note_end(self, step: Step) -> None:
        """The result of the oldest step has come."""
        now = self._clock()
        duration_s = now - self._began_at(step)
        self._ended_at = now
        size = _size_of(step)
        self._durations[size] = _expect(self._durations.get(size), duration_s)
        if step.is_exclusive:
            self._first_step_s = _expect(self._first_step_s, duration_s)
        elif step.num_limited_tokens and self._first_step_s is not None:
            self._adapt_limit(step.num_limited_tokens, self._durations[size], self._first_step_s)

    def _adapt_limit(self, num_tokens: int, lasts_s: float, first_step_s: float) -> None:
        """Make for steps as long as they may be; one of so many tokens, and a fixed cost, lasts `lasts_s`."""
        change = STRETCH * first_step_s / max(lasts_s, 1e-6)
        limit = num_tokens * min(_MAX_CHANGE, max(1 / _MAX_CHANGE, change))
        if self._limit is None:
            self._limit = limit if change < 1 else None
        elif change < 1 or num_tokens >= 0.9 * self._limit:  # else there was not more to compute
            self._limit += _SMOOTHING * (limit - self._limit)

    def _began_at(self, step: Step) -> float:
        return max(step.launched_at, self._ended_at)


def share_of(tenant: Tenant) -> float:
    """Rows over weight."""
    return tenant.num_rows / tenant.weight


def is_in_excess(share: float, newcomer: Tenant) -> bool:
    """True of a share that is so much greater than the newcomer's that its holder gives way."""
    return share > EXCESS * (newcomer.num_rows + 1) / newcomer.weight


def _size_of(step: Step) -> tuple[int, int]:
    """Steps of one size last about as long: tokens computed and sampled, each within a factor of 1.2."""
    return round(2 * log2(step.num_scheduled_tokens)), round(2 * log2(1 + len(step.sampled)))


def _expect(expected_s: float | None, seen_s: float) -> float:
    if expected_s is None:
        return seen_s
    smoothing = _SMOOTHING_LONGER if seen_s > expected_s else _SMOOTHING
    return expected_s + smoothing * (min(seen_s, _MAX_CHANGE * expected_s) - expected_s)
