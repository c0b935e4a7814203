"""Blame: finds the one request that makes steps fail or workers die, and lets all others go on.

Suspects run in groups, and everybody else waits: a group that fails is halved, the one that fails alone twice
is the culprit, and a group is cleared when all its members have got a token further. A test begins and ends
with no step in flight: what the last step of a group does to worker or core is not laid on the next group.
When a step raises, every request in it is suspected. Anybody may kill a worker: at a death only those are
that were in flight, and had got no further since the death before.
"""

from __future__ import annotations

import math
from enum import Enum, auto

from ...ipc.messages import SUSPECT_ATTEMPTS
from ..scheduling.request import Request, drop_finished
from ..scheduling.scheduler import Scheduler

FAILURES_ALONE = 2  # that convict: one may be an accident
MAX_DEATHS = 64  # without a step that went well; more are not about a request, but the worker's own


class WorkerDeath(Enum):
    """What a worker's death says about the worker."""

    UNEXPLAINED = auto()
    SEARCHED = auto()  # it was part of a search: nothing
    CONVICTED = auto()  # a request did it, and the deaths before it too


class Blame:
    """At rest until something fails; then `is_searching` until every suspect is convicted or cleared."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[list[Request]] = []  # the last is under test
        self._must_begin = False  # its test waits for the steps in flight, which are of anybody
        self._num_known: dict[str, float] = {}  # output tokens of its members when its test began
        self._died_at: dict[str, int] = {}  # output tokens of requests at the last death, of those in flight
        self._num_deaths = 0
        self._num_alone = 0  # failures of the one request that is under test
        self._must_reset = False

    @property
    def is_searching(self) -> bool:
        """True while a group is under test."""
        return bool(self._groups)

    @property
    def explains_deaths(self) -> bool:
        """False after deaths that are too many to be about requests."""
        return self._num_deaths <= MAX_DEATHS

    @property
    def alone(self) -> str | None:
        """The request under test if it is one: the next step is of it, and nothing else runs."""
        is_alone = bool(self._groups) and len(self._groups[-1]) == 1 and not self._must_begin
        return self._groups[-1][0].request_id if is_alone else None

    @property
    def must_wait(self) -> bool:
        """True while no further step may be formed, because a test begins or ends after those in flight."""
        if not self._groups or not self._scheduler.in_flight:
            return False
        return self._must_begin or self._has_cleared_group

    def add(self, request: Request) -> None:
        """A new request waits. One that several engine cores were lost with in a row is tested alone, after
        what is tested now.
        """
        self._scheduler.add(request)
        if request.num_attempts >= SUSPECT_ATTEMPTS:
            self._groups.insert(0, [request])
            if len(self._groups) == 1:
                self._must_begin = True
                self.note_progress()

    def take_failure(self, suspects: list[Request]) -> Request | None:
        """A step with `suspects` has raised: all wait again. The culprit, if clear: the caller ends it."""
        self._preempt_all()
        is_of_test = bool(self._groups) and not self._must_begin
        return self._judge(self._groups.pop() if is_of_test else suspects)

    def take_death(self, suspects: list[Request]) -> Request | None:
        """A worker has died with `suspects` in flight. As `take_failure`; the next worker has no rows."""
        self._preempt_all()
        self._must_reset = False
        self._num_deaths += 1
        if self._groups:
            if not any(one in suspects for one in self._groups[-1]):
                self._begin_test()  # it had not begun again
                return None
            return self._judge(self._groups.pop())
        group = [one for one in suspects if self._died_at.get(one.request_id) == one.num_output_tokens]
        self._died_at = {one.request_id: one.num_output_tokens for one in suspects}
        return self._judge(group) if group else None

    def take_shortage(self) -> None:
        """A step was too large for the device's memory: every running request waits, and nobody is judged."""
        self._preempt_all()
        self.note_progress()

    def note_step(self) -> None:
        """A step went well: its tokens have been taken."""
        self._num_deaths = 0
        self.note_progress()

    def note_progress(self) -> None:
        """Requests have got on or have ended: once nothing is in flight, a cleared group makes way."""
        if self._scheduler.in_flight:
            return
        if self._has_cleared_group:
            self._groups.pop()
            self._num_alone = 0
        elif not self._must_begin:
            return
        if self._groups:
            self._preempt_all()
        self._begin_test()

    def take_reset(self) -> bool:
        """True once after the worker's rows have become void: send it ResetRows before the next step."""
        must_reset, self._must_reset = self._must_reset, False
        return must_reset

    def _preempt_all(self) -> None:
        self._scheduler.preempt_all()
        self._must_reset = True

    def _judge(self, group: list[Request]) -> Request | None:
        """`group` has failed: the culprit if it is one request, the last time; else its parts are tested."""
        group = drop_finished(group)
        culprit = None
        self._num_alone = self._num_alone + 1 if len(group) == 1 else 0
        if self._num_alone == FAILURES_ALONE:
            culprit = group[0]
            self._num_alone = 0
        elif len(group) == 1:
            self._groups.append(group)
        else:
            half = len(group) // 2
            self._groups += [group[half:], group[:half]]
        self._begin_test()
        return culprit

    def _begin_test(self) -> None:
        """Let only the last group's members run; all of them, if there is no group left."""
        self._must_begin = False
        self._groups = [live for group in self._groups if (live := drop_finished(group))]
        if not self._groups:
            self._scheduler.policy.run_all()
            self._num_known = {}
            return
        group = self._groups[-1]
        self._scheduler.policy.run_only(group)
        self._num_known = {request.request_id: _count_known(request) for request in group}

    @property
    def _has_cleared_group(self) -> bool:
        """Whether the group under test has come through."""
        return bool(self._groups) and not self._must_begin and all(map(self._is_cleared, self._groups[-1]))

    def _is_cleared(self, request: Request) -> bool:
        is_further = request.num_output_tokens > self._num_known[request.request_id]
        return is_further or request.finish_reason is not None


def _count_known(request: Request) -> float:
    """Tokens beyond which a request under test is cleared.

    A beam search begins anew with every core: that it gets as far as before clears it of no core's death.
    """
    if request.group is not None and request.num_attempts >= SUSPECT_ATTEMPTS:
        return math.inf
    return request.num_output_tokens
