"""How many threads, torch's and the kernels', a CPU worker uses for a step: small steps lose more by joining.

Measured on 2 cores, least time of a decode step in us with 1 and 2 threads that share each kernel's work: the
bench's `tiny` (1.3 M weights) 8 requests 270 and 303, 16 requests 356 and 453; the pocket model (3.2 M) 8
requests 905 and 1,012, 16 requests 1,316 and 1,437, 24 requests 1,957 and 2,074. From MIN_SHARED_TOKENS on,
threads share the step's tokens instead (kernels/program/program.cpp) and meet once a layer.
"""

from __future__ import annotations

import psutil

from ..ipc.processes.cgroup import count_processors

# Larger weights come from memory, whose bandwidth one core alone does not use.
MAX_SINGLE_THREAD_WEIGHT_BYTES = 32 << 20
MAX_SINGLE_THREAD_WORK = 50_000_000  # multiply-adds of a step, about half a millisecond on one core
MIN_SHARED_TOKENS = 32  # a tile of 16 rows for each of two threads


class ThreadRule:
    """Chooses by a step's size, unless num_threads was `requested`."""

    def __init__(self, requested: int | None, weight_bytes: int, num_active_params: int) -> None:
        self._most = requested or count_cores()
        self._is_fixed = requested is not None or weight_bytes > MAX_SINGLE_THREAD_WEIGHT_BYTES
        self._num_active_params = num_active_params

    def choose(self, num_tokens: int) -> int:
        """The number of threads for a step of `num_tokens` tokens."""
        is_large = num_tokens * self._num_active_params > MAX_SINGLE_THREAD_WORK
        return self._most if self._is_fixed or (is_large and num_tokens >= MIN_SHARED_TOKENS) else 1


def count_cores() -> int:
    """Physical cores that this process may keep busy."""
    return max(1, min(psutil.cpu_count(logical=False) or 1, count_processors()))
