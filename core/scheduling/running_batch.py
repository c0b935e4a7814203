"""RunningBatch: the requests that run, the rows and blocks that they hold, and the steps in flight.

It is what a scheduling policy looks at and the scheduler changes. It keeps the books and decides nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from ...ipc.errors import ProtocolError
from ...ipc.spec.config import SchedulerConfig
from ..kv.kv_cache_manager import KVCacheManager, PrefixHit
from .request import Request, RequestStatus
from .step import Step
from .step_times import StepTimes


class RunningBatch:
    """Running requests sorted by `Request.order`, each with a row of its own and its blocks."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, times: StepTimes) -> None:
        self.config = config
        self.times = times
        self.manager = manager
        self.requests: list[Request] = []  # sorted, so the last one is the one to preempt
        self.in_flight: deque[Step] = deque()  # steps that the worker has not answered, the oldest first
        self.max_step_tokens = config.max_num_batched_tokens
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._withheld_rows: list[int] = []  # while steps are limited to fewer
        self.max_step_rows = config.max_num_seqs
        self._freed_rows: list[int] = []  # the worker has not been told of them

    @property
    def num_used_rows(self) -> int:
        """Rows of running requests."""
        return self.config.max_num_seqs - len(self.free_rows) - len(self._withheld_rows)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that stay free when a request is admitted: one of each KV group for each row in use.

        Each will soon fill its last block; admitting into these would preempt the newcomer right away.
        """
        return self.num_used_rows * self.manager.num_groups if self.manager.has_kv else 0

    @property
    def has_free_row(self) -> bool:
        """No more rows than a step has tokens: decodes that were left out come back all at once."""
        return bool(self.free_rows) and len(self.requests) < self.max_step_tokens

    def lacks_room(self, request: Request) -> bool:
        """Whether a waiting request could not be admitted now, for want of a row or of blocks."""
        return not self.free_rows or self.lacks_blocks(request, self.manager.find_prefix(request))

    def lacks_blocks(self, request: Request, hit: PrefixHit) -> bool:
        """Whether too few blocks are free for a waiting request whose longest known prefix is `hit`."""
        manager = self.manager
        return manager.count_taken(request, hit) + self.num_reserved_blocks > manager.pool.num_free

    def enter(self, request: Request) -> None:
        """Let a request run that has been given blocks; there is a row."""
        request.status = RequestStatus.RUNNING
        request.row = self.free_rows.pop()
        request.tenant.num_rows += 1
        insort(self.requests, request, key=lambda running: running.order)

    def release(self, request: Request) -> None:
        """Take the row and the blocks of a request that is to leave `requests`, or has left it."""
        assert request.row is not None
        request.tenant.num_rows -= 1
        self.manager.free(request)
        self.free_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = None

    def is_oldest(self, step_id: int) -> bool:
        """True if it is the oldest step in flight, False if it is one that was forgotten.

        Raises ProtocolError if it is a later one: the worker answers in order.
        """
        if self.in_flight and self.in_flight[0].step_id < step_id:
            raise ProtocolError(f"the worker answered step {step_id} before step {self.in_flight[0].step_id}")
        return bool(self.in_flight) and self.in_flight[0].step_id == step_id

    def forget_steps(self) -> None:
        """The worker has lost its rows and will answer no step in flight."""
        for step in self.in_flight:
            self.manager.forget(step.indexed_blocks, step.saved_states)
            for request in step.sampled:
                request.num_placeholders = 0
        self.in_flight.clear()

    def take_freed_rows(self) -> list[int]:
        """Rows that were given up since the last call, for the worker."""
        freed, self._freed_rows = self._freed_rows, []
        return freed

    def limit_steps(self, max_tokens: int, max_rows: int) -> None:
        """Have no step of more tokens or rows from now on. Fewer than now only when nothing runs."""
        rows = self.free_rows + self._withheld_rows
        num_withheld = min(self.config.max_num_seqs - max_rows, len(rows))
        assert not self.requests or num_withheld <= len(self._withheld_rows), "rows of running requests"
        self.max_step_tokens, self.max_step_rows = max_tokens, max_rows
        self._withheld_rows = rows[:num_withheld]
        self.free_rows = rows[num_withheld:]

    def check(self) -> list[str]:
        """What is wrong with rows, order and states; empty if nothing is."""
        problems: list[str] = []
        rows = [request.row for request in self.requests]
        if sorted(self.free_rows + self._withheld_rows + [row for row in rows if row is not None]) != list(
            range(self.config.max_num_seqs)
        ):
            problems.append(f"free rows {self.free_rows} and running rows {rows} are not all rows once")
        if any(a.order >= b.order for a, b in zip(self.requests, self.requests[1:], strict=False)):
            problems.append("the running list is out of order")
        for request in self.requests:
            if request.status is not RequestStatus.RUNNING:
                problems.append(f"{request.request_id} runs with status {request.status.name}")
        return problems
