"""Blame: finds the one request that makes steps fail or workers die, and lets all others go on.

Suspects run in groups, and everybody else waits: a group that fails is split, the one that fails alone twice
is the culprit, and a group is cleared when all its members have got a token further. A test begins and ends
with no step in flight: what the last step of a group does to worker or core is not laid on the next group.
When a step raises, or takes too long, every request in it is suspected. Anybody may kill a worker: at a death
only those are that were in flight, and had got no further since the death before.
A step that raises costs little, so groups are halved. A lost worker costs seconds and a sound test some
milliseconds, so its suspects are many small groups, the least suspicious first. One that has cost a worker is
tested again when all others are cleared, behind a pause as long as these were held up, in which all run but
who has failed. So of up to 64 suspects of a step that took too long nobody is silent for longer than that
step and, for each culprit, one test and two starts of a worker; and a sound test of each.
Who is cleared may hang again later. Suspects of such steps are remembered until one is convicted: in the next
search who was cleared before has to go on for twice as many tokens as it did then, or to its end. Longer
tests come later, and have fewer groups, so that they hold the others up for little; who fails one spares the
others those that are longer still. A suspect whose client does not wait for the verdict is taken for the
culprit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from ...ipc.protocol.messages import SUSPECT_ATTEMPTS, FinishReason
from ..scheduling.request import Request, drop_finished
from ..scheduling.scheduler import Scheduler

FAILURES_ALONE = 2  # that convict: one may be an accident
_NUM_PARTS = 64  # of a group that has cost a worker
_MAX_TEST_STEPS = 256  # of all groups that are tested longer together, where two groups suffice
MAX_DEATHS = 64  # without a step that went well; more are not about a request, but the worker's own


class WorkerDeath(Enum):
    """What a worker's death says about the worker."""

    UNEXPLAINED = auto()
    SEARCHED = auto()  # it was part of a search: nothing
    CONVICTED = auto()  # a request did it, and the deaths before it too


@dataclass(slots=True)
class _Group:
    """Suspects that are tested together, until each has got so many tokens further."""

    members: list[Request]
    num_steps: int = 1
    num_failures: int = 0  # of its one member alone
    waits_for_pause: bool = False  # it has cost a worker
    num_known: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # each is cleared beyond these tokens

    def __post_init__(self) -> None:
        self.count_anew()

    def count_anew(self) -> None:
        """What its members have got up to now counts for nothing."""
        self.num_known = {one.request_id: _count_known(one) + self.num_steps - 1 for one in self.members}

    def has_cleared(self, request: Request) -> bool:
        """Whether this member has got further, or has ended."""
        return self._is_further(request) or request.finish_reason is not None

    def has_left(self, request: Request) -> bool:
        """Whether its client has ended it before it was cleared."""
        return request.finish_reason is FinishReason.ABORT and not self._is_further(request)

    def _is_further(self, request: Request) -> bool:
        return request.num_output_tokens > self.num_known[request.request_id]


@dataclass(frozen=True, slots=True)
class _Past:
    """What is known of a request since a step of it took too long."""

    num_tokens: int  # that it had then
    num_steps: int  # of its test


class Blame:
    """At rest until something fails; then `is_searching` until every suspect is convicted or cleared."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[_Group] = []  # the last is under test
        self._must_begin = False  # its test waits for the steps in flight, which are of anybody
        self._held_since = math.inf  # since when only suspects run
        self._owes_pause = False  # a test has cost a worker since
        self._is_paused = False  # the next test waits while those run that are not suspected
        self._paused_until = math.inf  # known when a worker is there
        self._died_at: dict[str, int] = {}  # output tokens of requests at the last death, of those in flight
        self._num_deaths = 0
        self._pasts: dict[Request, _Past] = {}  # of suspects of steps that took too long
        self._has_left = False  # a suspect, which may have been the culprit
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
            self._groups.insert(0, _Group([request]))
            if len(self._groups) == 1:
                self._must_begin = True
                self.note_progress()

    def take_failure(self, suspects: list[Request]) -> Request | None:
        """A step with `suspects` has raised: all wait again. The culprit, if clear: the caller ends it."""
        self._preempt_all()
        culprit, parts = self._judge(self._groups.pop() if self.is_testing else _Group(suspects), 2)
        self._groups += reversed(parts)
        self._begin_test()
        return culprit

    def take_death(self, suspects: list[Request], overdue: list[Request]) -> Request | None:
        """A worker has died with `suspects` in flight.

        `overdue` were in a step that took too long; some may have ended meanwhile.
        As `take_failure`; the next worker has no rows.
        """
        self._preempt_all()
        self._must_reset = False
        self._num_deaths += 1
        if self.is_testing:
            if not any(one in suspects for one in self._groups[-1].members):
                self._begin_test()  # it had not begun again
                return None
            return self._take_death_in_test(self._groups.pop())
        if overdue:
            self._suspect_overdue(overdue)
        else:
            self._suspect(
                [one for one in suspects if self._died_at.get(one.request_id) == one.num_output_tokens]
            )
        self._died_at = {one.request_id: one.num_output_tokens for one in suspects}
        if self._groups:
            self._begin_test()
            self._owes_pause = True
        return None

    def explains(self, overdue: list[Request]) -> bool:
        """Whether their step narrows an earlier search, as one of them was in it, or a suspect has left."""
        is_known = any(one in self._pasts or one.finish_reason is FinishReason.ABORT for one in overdue)
        return is_known or bool(overdue and self._has_left)

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
            self._drop_cleared()
        elif not self._must_begin or not self._is_pause_over:
            return
        if self._groups:
            self._preempt_all()
        if self._is_paused:
            self._begin_test()
        else:
            self._begin_test_or_pause()

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

    def _take_death_in_test(self, failed: _Group) -> Request | None:
        """Its parts are tested again when all others have been."""
        culprit, parts = self._judge(failed, _NUM_PARTS)
        for part in parts:
            part.waits_for_pause = True
        self._groups[:0] = reversed(parts)
        if culprit is not None:
            self._pasts.clear()
        # Who has not failed and would be tested longer than this one was is spared.
        self._groups = [
            one for one in self._groups if one.num_steps <= failed.num_steps or one.waits_for_pause
        ]
        self._owes_pause = True
        self._begin_test_or_pause()
        return culprit

    def _suspect_overdue(self, overdue: list[Request]) -> None:
        """Their step took too long, as others of theirs may have before."""
        self._has_left = False
        self._pasts = {one: past for one, past in self._pasts.items() if one.finish_reason is None}
        by_length: dict[int, list[Request]] = {}  # about as long tests together
        for request in drop_finished(overdue):
            num_steps = 1
            if (past := self._pasts.get(request)) is not None:
                num_steps = 2 * max(request.num_output_tokens - past.num_tokens, past.num_steps)
            self._pasts[request] = _Past(request.num_output_tokens, num_steps)
            by_length.setdefault(num_steps.bit_length(), []).append(request)
        for _, members in sorted(by_length.items(), reverse=True):
            self._suspect(members, max(self._pasts[request].num_steps for request in members))
        if any(request.finish_reason is FinishReason.ABORT for request in overdue):
            self._pasts.clear()  # taken for the culprit

    def _suspect(self, members: list[Request], num_steps: int = 1) -> None:
        """A worker was lost with them: they are tested next."""
        _, parts = self._judge(_Group(members, num_steps), _NUM_PARTS)
        self._groups += reversed(parts)

    def _judge(self, group: _Group, num_parts: int) -> tuple[Request | None, list[_Group]]:
        """`group` has failed: the culprit if it is one request, the last time; else its parts to test."""
        members = sorted(drop_finished(group.members), key=_find_suspicion)
        num_failures = group.num_failures + 1 if len(members) == 1 else 0
        if num_failures == FAILURES_ALONE:
            return members[0], []
        if group.num_steps > 1:
            num_parts = max(2, min(num_parts, _MAX_TEST_STEPS // group.num_steps))
        size = -(-len(members) // num_parts) or 1
        parts = [members[start : start + size] for start in range(0, len(members), size)]
        return None, [_Group(part, group.num_steps, num_failures) for part in parts]

    def _begin_test_or_pause(self) -> None:
        """Before those who have cost a worker are tested again all others run, if there are any."""
        self._drop_cleared()
        if self._groups and self._groups[-1].waits_for_pause and self._owes_pause:
            held = [request for group in self._groups for request in drop_finished(group.members)]
            if self._scheduler.policy.run_all_but(held):
                self._must_begin = self._is_paused = True
                self._paused_until = math.inf
                return
            self._owes_pause = False
        self._begin_test()

    def _drop_cleared(self) -> None:
        """One whose client does not wait for the verdict is taken for the culprit."""
        for group in self._groups:
            if any(map(group.has_left, group.members)):
                self._has_left = True
                self._pasts.clear()
            group.members = [request for request in group.members if not group.has_cleared(request)]
        self._groups = [group for group in self._groups if group.members]

    def _begin_test(self) -> None:
        """Let only the last group's members run; all requests, if there is no group left."""
        if self._is_paused and self._paused_until < math.inf:
            self._held_since, self._owes_pause = math.inf, False
        self._must_begin = self._is_paused = False
        self._held_since = min(self._held_since, self._now)
        self._drop_cleared()
        if not self._groups:
            self._held_since, self._owes_pause = math.inf, False
            self._scheduler.policy.run_all()
            return
        self._groups[-1].count_anew()
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
