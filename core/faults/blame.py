"""Blame: finds the one request that makes steps fail or workers die, and lets all others go on.

Suspects run in groups, and everybody else waits: a group that fails is split, the one that fails alone twice
is the culprit, and a group is cleared when all its members have got a token further. A test begins and ends
with no step in flight: what the last step of a group does to worker or core is not laid on the next group.
When a step raises, or takes too long, every request in it is suspected. Anybody may kill a worker: at a death
only those are that were in flight, and had got no further since the death before.
A step that raises costs little, so groups are halved. A lost worker costs seconds and a sound test some
milliseconds, so its suspects are many small groups, the least suspicious first. A test that costs a worker is
followed by a pause as long as that held the others up: all run but the group that has failed, and who of the
other groups gets a token further is cleared. So of up to 64 suspects nobody is silent for longer than the
step that took too long, one test, two starts of a worker, and a sound test of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from ...ipc.protocol.messages import SUSPECT_ATTEMPTS
from ..scheduling.request import Request, drop_finished
from ..scheduling.scheduler import Scheduler

FAILURES_ALONE = 2  # that convict: one may be an accident
_NUM_PARTS = 64  # of a group that has cost a worker
MAX_DEATHS = 64  # without a step that went well; more are not about a request, but the worker's own


class WorkerDeath(Enum):
    """What a worker's death says about the worker."""

    UNEXPLAINED = auto()
    SEARCHED = auto()  # it was part of a search: nothing
    CONVICTED = auto()  # a request did it, and the deaths before it too


@dataclass(slots=True)
class _Group:
    """Suspects that are tested together."""

    members: list[Request]
    num_known: dict[str, float]  # output tokens of each, beyond which it is cleared

    def has_cleared(self, request: Request) -> bool:
        """Whether this member has got further, or has ended."""
        is_further = request.num_output_tokens > self.num_known[request.request_id]
        return is_further or request.finish_reason is not None


def _make_group(members: list[Request]) -> _Group:
    return _Group(members, {request.request_id: _count_known(request) for request in members})


class Blame:
    """At rest until something fails; then `is_searching` until every suspect is convicted or cleared."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[_Group] = []  # the last is under test
        self._must_begin = False  # its test waits for the steps in flight, which are of anybody
        self._held_since = 0.0  # since when only suspects run
        self._is_paused = False  # the next test waits while those run that are not suspected
        self._paused_until = math.inf  # known when a worker is there
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
        if not self.is_testing or len(self._groups[-1].members) != 1:
            return None
        return self._groups[-1].members[0].request_id

    @property
    def is_testing(self) -> bool:
        """Whether the next step is of suspects only."""
        return bool(self._groups) and not self._must_begin

    @property
    def must_wait(self) -> bool:
        """True while no further step may be formed, because a test begins or ends after those in flight."""
        if not self._groups or not self._scheduler.in_flight:
            return False
        if self._is_paused:
            return self._now >= self._paused_until
        return self._must_begin or self._has_cleared_group

    @property
    def next_test_at(self) -> float | None:
        """When a pause is over, by the monotonic clock; None if there is none, or an answer comes first."""
        is_known = self._is_paused and self._paused_until < math.inf
        return self._paused_until if is_known and not self._scheduler.in_flight else None

    def add(self, request: Request) -> None:
        """A new request waits. One that several engine cores were lost with in a row is tested alone, after
        what is tested now.
        """
        is_suspect = request.num_attempts >= SUSPECT_ATTEMPTS
        if is_suspect and self._is_paused:
            self._scheduler.policy.hold(request)
        self._scheduler.add(request)
        if is_suspect:
            self._groups.insert(0, _make_group([request]))
            if len(self._groups) == 1:
                self._must_begin = True
                self.note_progress()

    def take_failure(self, suspects: list[Request]) -> Request | None:
        """A step with `suspects` has raised: all wait again. The culprit, if clear: the caller ends it."""
        self._preempt_all()
        culprit = self._judge(self._groups.pop().members if self.is_testing else suspects, 2)
        self._begin_test()
        return culprit

    def take_death(self, suspects: list[Request], overdue: list[Request]) -> Request | None:
        """A worker has died with `suspects` in flight, of which `overdue` were in a step that took too long.

        As `take_failure`; the next worker has no rows.
        """
        self._preempt_all()
        self._must_reset = False
        self._num_deaths += 1
        culprit = None
        if self.is_testing:
            if not any(one in suspects for one in self._groups[-1].members):
                self._begin_test()  # it had not begun again
                return None
            failed = self._groups.pop().members
            culprit = self._judge(failed, _NUM_PARTS)
            self._pause(failed)
            return culprit
        group = overdue or [
            one for one in suspects if self._died_at.get(one.request_id) == one.num_output_tokens
        ]
        self._died_at = {one.request_id: one.num_output_tokens for one in suspects}
        if group:
            culprit = self._judge(group, _NUM_PARTS)
        if self._groups:
            self._begin_test()
        return culprit

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
        elif not self._must_begin or not self._is_pause_over:
            return
        if self._groups:
            self._preempt_all()
        self._begin_test()

    def take_reset(self) -> bool:
        """True once after the worker's rows have become void: send it ResetRows before the next step.

        Called before steps are formed, while there is a worker: a pause begins and ends here.
        """
        if self._is_paused:
            if self._paused_until == math.inf:
                self._paused_until = 2 * self._now - self._held_since
            self.note_progress()
        must_reset, self._must_reset = self._must_reset, False
        return must_reset

    def _preempt_all(self) -> None:
        self._scheduler.preempt_all()
        self._must_reset = True

    def _judge(self, group: list[Request], num_parts: int) -> Request | None:
        """`group` has failed: the culprit if it is one request, the last time; else its parts are next."""
        group = drop_finished(group)
        culprit = None
        self._num_alone = self._num_alone + 1 if len(group) == 1 else 0
        if self._num_alone == FAILURES_ALONE:
            culprit = group[0]
            self._num_alone = 0
        else:
            group = sorted(group, key=_find_suspicion)
            size = -(-len(group) // num_parts)
            parts = [group[start : start + size] for start in range(0, len(group), size or 1)]
            self._groups += map(_make_group, reversed(parts))
        return culprit

    def _pause(self, failed: list[Request]) -> None:
        """Let all run but those that have failed together, if there are others, before the next test."""
        if self._groups and self._scheduler.policy.run_all_but(drop_finished(failed)):
            self._must_begin = self._is_paused = True
            self._paused_until = math.inf
        else:
            self._begin_test()

    def _begin_test(self) -> None:
        """Let only the last group's members run; all requests, if there is no group left."""
        self._must_begin = self._is_paused = False
        self._held_since = self._now
        for group in self._groups:
            group.members = [request for request in group.members if not group.has_cleared(request)]
        self._groups = [group for group in self._groups if group.members]
        if not self._groups:
            self._scheduler.policy.run_all()
            return
        self._scheduler.policy.run_only(self._groups[-1].members)

    @property
    def _now(self) -> float:
        return self._scheduler.policy.monotonic()

    @property
    def _is_pause_over(self) -> bool:
        """Also when nobody is left to run in it."""
        has_others = bool(self._scheduler.running or self._scheduler.policy.waiting)
        return not self._is_paused or self._now >= self._paused_until or not has_others

    @property
    def _has_cleared_group(self) -> bool:
        """Whether the group under test has come through."""
        return self.is_testing and all(map(self._groups[-1].has_cleared, self._groups[-1].members))


def _find_suspicion(request: Request) -> tuple[bool, bool, float]:
    """Greater for who is more likely to be the culprit: who brings a program of sorts, who is new here."""
    runs_texts = bool(request.grammar or request.extra_args)
    return runs_texts, not request.num_output_tokens, request.arrival_time


def _count_known(request: Request) -> float:
    """Tokens beyond which a request under test is cleared.

    A beam search begins anew with every core: that it gets as far as before clears it of no core's death.
    """
    if request.group is not None and request.num_attempts >= SUSPECT_ATTEMPTS:
        return math.inf
    return request.num_output_tokens
