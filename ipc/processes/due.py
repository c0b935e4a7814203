"""When something is to be done though nothing arrives: times of the monotonic clock, None for never."""

from __future__ import annotations

import time


def find_earliest(*times: float | None) -> float | None:
    """The first of these times, None if there is none."""
    earliest: float | None = None
    for at in times:
        if at is not None and (earliest is None or at < earliest):
            earliest = at
    return earliest


def until_ms(at: float) -> int:
    """Milliseconds to a monotonic time, rounded up: a poll that ends early would have to be repeated."""
    return 1 + max(0, int(1000 * (at - time.monotonic())))
