"""The scheduling policies, a file each, by their names in SchedulingPolicy (ipc/spec/config.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..scheduling.running_batch import RunningBatch
from .fair import FairPolicy
from .fcfs import FcfsPolicy
from .policy import Policy
from .priority import PriorityPolicy

# The second argument is the monotonic clock.
POLICIES: dict[str, Callable[[RunningBatch, Callable[[], float]], Policy[Any]]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
    "fair": FairPolicy,
}
