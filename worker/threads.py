"""How many threads, torch's and the kernels', a CPU worker uses for a step: small ones lose more by joining.

Measured on 2 cores, least time of a decode step in us with 1 and 2 threads that share each kernel's work: the
bench's `tiny` (1.3 M weights) 8 requests 270 and 303, 16 requests 356 and 453; the pocket model (3.2 M) 8
requests 905 and 1,012, 16 requests 1,316 and 1,437, 24 requests 1,957 and 2,074. From MIN_SHARED_TOKENS on,
threads share the step's tokens instead (kernels/program/program.cpp) and meet once a layer.
"""

from __future__ import annotations

import psutil

from ..ipc.processes.cgroup import count_processors

# Above this the weights come from memory, and one core alone does not use its bandwidth.
MAX_SINGLE_THREAD_WEIGHT_BYTES = 32 << 20
# Multiply-adds of a step below which it takes about half a millisecond on one core.
MAX_SINGLE_THREAD_WORK = 50_000_000
# What two threads need for a tile of 16 rows each.
MIN_SHARED_TOKENS = 32


class ThreadRule:
    """Chooses by a step's size; `requested` (num_threads) is taken as it is."""

    def __init__(self, requested: int | None, weight_bytes: int, num_active_params: int) -> None:
        self._most = requested or count_cores()
        self._is_fixed = requested is not None or weight_bytes > MAX_SINGLE_THREAD_WEIGHT_BYTES
        self._num_active_params = num_active_params

    def choose(self, num_tokens: int) -> int:
        """Threads for a step of so many tokens."""
        is_large = num_tokens * self._num_active_params > MAX_SINGLE_THREAD_WORK
        return self._most if self._is_fixed or (is_large and num_tokens >= MIN_SHARED_TOKENS) else 1


def count_cores() -> int:
    """Physical cores that this process may keep busy."""
    return max(1, min(psutil.cpu_count(logical=False) or 1, count_processors()))
