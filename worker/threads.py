"""How many torch threads a CPU worker uses for a step. Small steps lose more by joining than a core brings.

Measured on 2 cores, tokens/s with 1 and 2 threads: the pocket model (3 M weights) one request 600 and 550,
256 requests 5,200 and 8,100; the bench's `tiny` (0.9 M) one request 900 and 700, 256 requests 15,000 and
20,000.
"""

from __future__ import annotations

import os

import psutil

# Above this the weights come from memory, and one core alone does not use its bandwidth.
MAX_SINGLE_THREAD_WEIGHT_BYTES = 32 << 20
# Multiply-adds of a step below which it takes about half a millisecond on one core.
MAX_SINGLE_THREAD_WORK = 50_000_000


class ThreadRule:
    """Chooses by a step's size; `requested` (num_threads) is taken as it is."""

    def __init__(self, requested: int | None, weight_bytes: int, dtype_size_bytes: int) -> None:
        self._most = requested or count_cores()
        self._is_fixed = requested is not None or weight_bytes > MAX_SINGLE_THREAD_WEIGHT_BYTES
        self._num_weights = weight_bytes // dtype_size_bytes

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens."""
        is_large = self._is_fixed or num_tokens * self._num_weights > MAX_SINGLE_THREAD_WORK
        return self._most if is_large else 1


def count_cores() -> int:
    """Physical cores that this process may run on."""
    physical = psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, _count_usable_cpus()))


def _count_usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
