"""ManagedChild: a place that one child process after the other takes. Every owner of processes uses it.

It reads no clock, waits for nothing and does not know what the process is for: its owner says what time it
is, what it has heard of the process (to `watch`), and that the process has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from .liveness import ChildWatch
from .process import ProcessHandle
from .restarts import RestartBudget

_log = logging.getLogger(__name__)


P = TypeVar("P", bound=ProcessHandle)


class ManagedChild(Generic[P]):
    """Starts, watches, ends and replaces the process of one place. Times are of the monotonic clock.

    `process` and its `watch` are None until the first start and after `stop`; `start_at` is when the next one
    is to be started, None if none is.
    """

    def __init__(self, start_process: Callable[[], P], budget: RestartBudget | None = None) -> None:
        """Without a `budget` the owner counts the losses."""
        self._start_process = start_process
        self._budget = budget
        self.process: P | None = None
        self.watch: ChildWatch | None = None
        self.start_at: float | None = None
        self.end_reason: str | None = None  # why there will be no other, once `replace` has said so

    @property
    def next_check_at(self) -> float | None:
        """When `is_due` or the watch's `look` has something to say; None if never."""
        return self.start_at if self.watch is None else self.watch.next_check_at

    def is_due(self, now: float) -> bool:
        """Whether a process is to be started now."""
        return self.start_at is not None and now >= self.start_at

    def start(self) -> ChildWatch:
        """Start a process, in place of the one before, and watch it. Raises as `start_process`."""
        if self.process is not None:
            self.process.stop(0.0)
        process = self._start_process()
        self.process, self.watch, self.start_at = process, ChildWatch(process), None
        return self.watch

    def stop(self, grace_s: float) -> str:
        """End the process, with SIGKILL after `grace_s`; returns how it has ended. Idempotent."""
        process, self.process, self.watch = self.process, None, None
        if process is None:
            return ""
        process.stop(grace_s)
        return process.describe_exit()

    def replace(self, reason: str, now: float) -> bool:
        """The process was lost: another is due at `start_at`. False: too often, as `end_reason` then says."""
        assert self._budget is not None
        after_s = self._budget.note_loss(now)
        if after_s is None:
            self.end_reason = f"{reason}, {self._budget.excess}"
            return False
        _log.error("%s; starting another", reason)
        self.start_at = now + after_s
        return True

    def forgive(self) -> None:
        """Forget the losses so far, also that they were too many: an operator asks for another one."""
        assert self._budget is not None
        self._budget.forgive()
        self.end_reason = None
