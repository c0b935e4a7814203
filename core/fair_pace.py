"""Pace: how long steps last, and what that allows tenants with more than their share while newcomers come.

A newcomer is a request with a prompt to compute whose tenant holds few rows beside another's many. It waits
for what is left of the running step, so steps are kept as long as newcomers' own first steps are: the tokens
of tenants in excess are limited to what lasts that long. And the step ahead is put together only shortly
before the running one ends, so that a newcomer misses that one at most. Both end WINDOW_S after the last
newcomer; without newcomers nothing is limited and nothing is late.

It knows durations, tokens and rows held; not requests, blocks or the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, log2

from .scheduler import Step
from .tenant import Tenant

WINDOW_S = 10.0  # how long a newcomer's tenant is expected back
SUBMIT_MARGIN_S = 0.002  # of the step ahead: a poll's rounding (1 ms), scheduling, the way to the worker
EXCESS = 2.0  # times the rows, over its weight, that the newcomer's tenant holds with it
MAX_TURNS = 8  # limited steps until each decode of tenants in excess had its turn; twice that beside prompts
# How long a step may last, in first steps of newcomers. Where the fixed cost of a step is most of it, less
# than its noise and the cost of full steps would cut the tokens to a fraction for nothing.
STRETCH = 1.25
NUM_SEEN = 8  # steps of a size that say how long the next one lasts
_MAX_CHANGE = 2.0  # of the limit, and
_SMOOTHING = 0.25  # of what one step asks for


class Pace:
    """Durations come from `clock`; the scheduler says what each step is."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended_at = clock()  # of the step whose result came last
        self._newcomer: Tenant | None = None  # the tenant of the last one
        self._newcomer_at = 0.0
        self._limit: float | None = None  # tokens of tenants in excess that last as long as they may
        self._first_steps: deque[float] = deque(maxlen=NUM_SEEN)  # those that newcomers had for themselves
        self._durations: dict[tuple[int, int], deque[float]] = {}  # by size of step; some 200 at most

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
        seen = self._durations.get(_size_of(running))
        return None if seen is None else self._began_at(running) + _expect(seen) - SUBMIT_MARGIN_S

    # -- what steps were

    def note_launch(self, step: Step) -> None:
        """A step was put together and goes to the worker."""
        step.launched_at = self._clock()

    def note_end(self, step: Step) -> None:
        """The result of the oldest step has come."""
        now = self._clock()
        duration_s = now - self._began_at(step)
        self._ended_at = now
        seen = self._durations.setdefault(_size_of(step), deque(maxlen=NUM_SEEN))
        seen.append(duration_s)
        if step.is_exclusive:
            self._first_steps.append(duration_s)
        elif step.num_limited_tokens and self._first_steps:
            self._adapt_limit(step.num_limited_tokens, STRETCH * _expect(self._first_steps) / _expect(seen))

    def _adapt_limit(self, num_tokens: int, change: float) -> None:
        """Make for steps that last `change` times as long as those of so many tokens do."""
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


def _expect(seen: deque[float]) -> float:
    """Low rather than high: a step ahead that comes late leaves the worker idle, a busy machine adds much.

    The very lowest do not count: of results that come late, both at once, the second seems to take no time.
    """
    return max(1e-6, sorted(seen)[len(seen) // 3])
