"""WorkerGroup: the worker processes of one model, one a rank, which are started, watched and lost together.

It knows which of the ranks' messages are the group's, and no socket.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ...ipc.processes.due import find_earliest
from ...ipc.processes.liveness import Deadline
from ...ipc.processes.managed_child import ManagedChild
from ...ipc.processes.process import ProcessHandle
from ...ipc.protocol.step import (
    ModelRunnerOutput,
    StepFailed,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from ...ipc.spec.config import ParallelConfig

_TEST_FACTOR = 10.0  # how much longer than others a step may take while Blame looks for a culprit
_MIN_TEST_S = 3.0


@dataclass(frozen=True, slots=True)
class _OwedStep:
    step_id: int
    num_tokens: int
    is_test: bool


class StepWatch:
    """Sets the deadline of each of a worker's ranks for the oldest step, or the start, that is not answered.

    Ranks share their deadline: what rank 0 answers, all have done. A step's time runs from when it was sent,
    or from the answer before it, whichever is later. A step of a search may take at most ten times as long as
    others did, where that is less than `step_timeout_s`. Pure: time is passed in.
    """

    def __init__(self, step_timeout_s: float) -> None:
        """`step_timeout_s` 0 sets no deadline."""
        self._step_timeout_s = step_timeout_s
        self._deadlines: Sequence[Deadline] = ()
        self._steps: deque[_OwedStep] = deque()
        self._expected_since = self._limit_s = 0.0  # for the oldest step
        # The longest times that steps have taken, with all workers; of a token: a step's over its tokens.
        self._longest_step_s = self._longest_token_s = 0.0

    def begin_start(self, deadlines: Sequence[Deadline], ready_timeout_s: float, now: float) -> None:
        """Another worker was started, whose ranks have these deadlines, and is to become ready."""
        self._deadlines = deadlines
        self._steps.clear()
        if self._step_timeout_s:
            self._set(now, ready_timeout_s, f"it was not ready within {ready_timeout_s:g} s")

    def is_overdue(self, now: float) -> bool:
        """Whether the oldest step took, or takes, longer than it may."""
        return bool(self._steps and self._step_timeout_s) and now - self._expected_since >= self._limit_s

    def add_step(self, step_id: int, now: float, num_tokens: int = 1, *, is_test: bool = False) -> None:
        """A step was sent. `is_test`: it belongs to a search for a culprit."""
        self._steps.append(_OwedStep(step_id, num_tokens, is_test))
        if len(self._steps) == 1:
            self._expect_step(now)

    def forget_steps(self) -> None:
        """The worker need not answer the steps that were sent."""
        self._steps.clear()
        self._clear()

    def note(self, event: object, now: float) -> None:
        """A message has come."""
        match event:
            case ModelRunnerOutput() | StepFailed():
                if self._steps and event.step_id == self._steps[0].step_id:
                    took_s, num_tokens = now - self._expected_since, self._steps.popleft().num_tokens
                    self._longest_step_s = max(self._longest_step_s, took_s)
                    self._longest_token_s = max(self._longest_token_s, took_s / max(1, num_tokens))
                    self._expect_step(now)
            case WorkerReady() | WorkerFailed():
                self._clear()
            case _:
                pass

    def _expect_step(self, now: float) -> None:
        """Set the deadline of the oldest step, if there is one."""
        self._expected_since = now
        if not self._steps or not self._step_timeout_s:
            self._clear()
            return
        step, allowed = self._steps[0], f"step_timeout_s={self._step_timeout_s:g}"
        self._limit_s = self._step_timeout_s
        if step.is_test:
            others_s = self._longest_step_s + step.num_tokens * self._longest_token_s
            limit_s = max(_MIN_TEST_S, _TEST_FACTOR * others_s)
            if limit_s < self._limit_s:
                allowed = f"{limit_s:.3g} s, over {_TEST_FACTOR:g} times what others take"
                self._limit_s = limit_s
        overdue = f"step {step.step_id} took longer than {allowed}"
        self._set(now, self._limit_s, overdue, forgives_starved=step.is_test)

    def _set(self, now: float, limit_s: float, otherwise: str, *, forgives_starved: bool = False) -> None:
        for deadline in self._deadlines:
            deadline.set(now, limit_s, otherwise, forgives_starved=forgives_starved)

    def _clear(self) -> None:
        for deadline in self._deadlines:
            deadline.clear()


WorkerEvent = ModelRunnerOutput | StepFailed | WorkerReady | WorkerFailed | WorkerProgress

# Of each rank in the shared memory (kernels/group/group_memory.h): a stamp that grows with its work; how many
# ranks wait for it; the steps that it has done, which are counted if there are several stages.
_MEMBER = struct.Struct("<III")
_MEMBER_DISTANCE = 4096


class WorkerGroup:
    """One worker process a rank; a group of one is a worker alone.

    `start_rank(rank, fd)` starts a process; `fd` is the file that ranks share, None for a worker alone.
    `is_elsewhere`: one process here stands for all ranks.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        start_rank: Callable[[int, int | None], ProcessHandle],
        *,
        is_elsewhere: bool = False,
    ) -> None:
        self._parallel = parallel
        num_processes = 1 if is_elsewhere else parallel.num_ranks
        self._fd: int | None = None
        self._ranks: list[ManagedChild[ProcessHandle]] = [
            ManagedChild(lambda rank=rank: start_rank(rank, self._fd)) for rank in range(num_processes)
        ]
        self._ready: dict[int, WorkerReady] = {}
        self._late_rank: int | None = None  # the one for which the others waited when they were given up

    def start(self) -> list[Deadline]:
        """Start all ranks, after the last ones were stopped. Returns each one's deadline, for StepWatch."""
        self._ready, self._late_rank = {}, None
        if len(self._ranks) > 1:
            self._fd = os.memfd_create("quire-group", os.MFD_CLOEXEC)
        return [rank.start().deadline for rank in self._ranks]

    @property
    def processes(self) -> list[ProcessHandle]:
        """The ranks' processes in their order; none before `start` and after `stop`."""
        return [rank.process for rank in self._ranks if rank.process is not None]

    @property
    def next_check_at(self) -> float | None:
        """When `look` has something to do, None if never. Monotonic."""
        return find_earliest(*(rank.next_check_at for rank in self._ranks))

    def look(self, now: float) -> None:
        """Give up ranks that are overdue or stopped, and kill those that were given up."""
        for rank in self._ranks:
            if rank.watch is not None:
                rank.watch.look(now)
        if self._fd is not None and self._late_rank is None and self.is_given_up:
            self._late_rank = self._find_late_rank()

    @property
    def is_given_up(self) -> bool:
        """Whether one of them was given up."""
        return any(rank.watch is not None and rank.watch.kill_reason is not None for rank in self._ranks)

    def give_up(self, because: str, now: float, rank: int | None = None) -> None:
        """Have one rank, or all, write its stacks, and kill it a moment later."""
        for child in [self._ranks[rank]] if rank is not None and rank < len(self._ranks) else self._ranks:
            if child.watch is not None:
                child.watch.give_up(because, now)

    @property
    def has_ended(self) -> bool:
        """Whether one of them has ended, which is the end of all."""
        return any(process.exit_code is not None for process in self.processes)

    def stop(self, grace_s: float) -> str:
        """End all. Returns how the first one that ended by itself, or else rank 0, has ended. Idempotent."""
        ended = [rank for rank, process in enumerate(self.processes) if process.exit_code is not None]
        for process in self.processes:  # all at once, before one is waited for
            process.close_lifeline()
            if not grace_s:
                process.send_signal(signal.SIGKILL)
        ends_at = time.monotonic() + grace_s
        texts = [rank.stop(max(0.0, ends_at - time.monotonic())) for rank in self._ranks]
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        first = ended[0] if ended else 0
        is_late = self._late_rank is not None and self._late_rank != first
        return texts[first] + (f"; rank {self._late_rank} was behind the others" if is_late else "")

    def take(self, rank: int, event: WorkerEvent) -> WorkerEvent | None:
        """The group's event in a rank's message, None if it is none.

        The group is ready once all ranks are. From then on the first rank of the last stage answers for all;
        with one stage that is rank 0.
        """
        match event:
            case WorkerReady():
                self._ready[rank] = event
                return join_ready(self._ready) if len(self._ready) == self._parallel.num_ranks else None
            case WorkerFailed():
                return event
            case _:
                return event if rank == self._parallel.speaker else None

    def _find_late_rank(self) -> int | None:
        """The rank for which all others wait, None if that is not known."""
        if self._fd is None:
            return None
        fd, ranks = self._fd, range(self._parallel.num_ranks)
        raw = [os.pread(fd, _MEMBER.size, _MEMBER_DISTANCE * (1 + rank)) for rank in ranks]
        is_whole = all(len(member) == _MEMBER.size for member in raw)
        return find_late_rank(raw, self._parallel.tensor_parallel_size) if is_whole else None


def find_late_rank(members: Sequence[bytes], stage_size: int) -> int | None:
    """The rank for which all others wait, by each one's part of the shared memory; None if unknown."""
    stamps, _, num_steps = zip(*map(_MEMBER.unpack, members), strict=True)
    first = 0
    if stage_size < len(members):
        if not any(num_steps):
            return None
        # A stage waits for those before it: of the stages that have done least the first is late.
        first = num_steps.index(min(num_steps)) // stage_size * stage_size
    of_stage = stamps[first : first + stage_size]
    least = min(of_stage)
    return first + of_stage.index(least) if of_stage.count(least) == 1 else None


def join_ready(ready: dict[int, WorkerReady]) -> WorkerReady | WorkerFailed:
    """One WorkerReady of all ranks': the blocks that each has, and the memory of all.

    WorkerFailed if the ranks have not loaded the same model.
    """
    first = ready[0]
    for rank, other in sorted(ready.items()):
        if other.weights_id != first.weights_id:
            text = f"rank {rank} sees other weights or another configuration than rank 0"
            return WorkerFailed(f"{text} ({other.weights_id}, not {first.weights_id})", "ModelError")
    answers = ready.values()
    ledger = Counter[str]()
    for answer in answers:
        ledger.update(dict(answer.ledger))
    return msgspec.structs.replace(
        first,
        ledger=list(ledger.items()),
        num_gpu_blocks=_find_least(answer.num_gpu_blocks for answer in answers),
        num_state_slots=_find_least(answer.num_state_slots for answer in answers),
        batch_variance_reason=next(filter(None, (answer.batch_variance_reason for answer in answers)), ""),
    )


def _find_least(counts: Iterable[int]) -> int:
    """Of those that have some: a stage may have no layer with KV, or none with states."""
    return min(filter(None, counts), default=0)


def name_roles(size: int) -> Sequence[str]:
    """The role of each rank's process; a worker alone has no number."""
    return ["worker"] if size == 1 else [f"worker-{rank}" for rank in range(size)]
