"""Waiting for what no event tells of."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

_POLL_S = 0.02


def wait_until(is_true: Callable[[], object], timeout_s: float) -> bool:
    """Ask again and again, a little apart, until it is; False when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], _POLL_S)
    return True
