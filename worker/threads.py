"""How many torch threads a CPU worker uses. A small model loses more at every join than a core brings."""

from __future__ import annotations

import os

import psutil

# Below this the weights sit in a core's caches and a layer takes microseconds.
SINGLE_THREAD_WEIGHT_BYTES = 32 << 20


def choose_num_threads(requested: int | None, weight_bytes: int) -> int:
    """`requested` if given; else one thread for small models and every physical core for larger ones."""
    if requested is not None:
        return requested
    return 1 if weight_bytes < SINGLE_THREAD_WEIGHT_BYTES else count_cores()


def count_cores() -> int:
    """Physical cores that this process may run on."""
    physical = psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, _count_usable_cpus()))


def _count_usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
