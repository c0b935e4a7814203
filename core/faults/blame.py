"""Blame: finds the one request that makes steps fail or workers die, and lets all others go on.

1. Suspects are tested in groups while all other requests wait. A group that fails is split; a request that
   fails alone twice is the culprit; a group is cleared when each member has got a token further. A test
   begins and ends with no step in flight, so that no group answers for another one's last step. A failure
   before the search counts as the first of the two if no other request was in flight.
2. When a step raises or takes too long, all its requests are suspects. When a worker dies, which may have
   other causes, only those are that were in flight and have got no token since the death before; but all that
   were in flight once the engine may bear no further death that nothing explains.
3. A step that raises costs little, so groups are halved. A lost worker costs seconds and a passed test only
   milliseconds, so its suspects are split into many small groups, the least suspicious first. A group that
   has cost a worker is tested again after all others, and after a pause as long as these were held up, in
   which all requests run but those that have failed. So with up to 64 suspects of a step that took too long
   no request waits longer than that step, a passed test of each suspect, and, for each culprit, one failed
   test and two starts of a worker.
4. A request that was cleared may hang or kill again later. The suspects of steps that took too long, and of
   the last death that the engine may bear, are remembered until one is convicted: in the next search each
   has to get twice as many tokens further as it did then, or end. These longer tests come later and have
   fewer groups, and once a group has failed a test the longer ones are spared. A suspect that its client
   aborts before the verdict is taken for the culprit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from ...ipc.protocol.messages import SUSPECT_ATTEMPTS, FinishReason
from ..scheduling.request import Request, drop_finished
from ..scheduling.scheduler import Scheduler

FAILURES_ALONE = 2  # that convict: one may be an accident
_NUM_PARTS = 64  # into which a group that has cost a worker is split
_MAX_TEST_STEPS = 256  # bounds the steps of a longer test times its groups, of which there are at least two
MAX_DEATHS = 64  # in a row without a good step; more are the worker's own fault


class WorkerDeath(Enum):
    """Whether a worker's death counts against the worker."""

    UNEXPLAINED = auto()
    SEARCHED = auto()  # no: it was part of a search
    CONVICTED = auto()  # no, nor do those before it: a request was the cause


@dataclass(slots=True)
class _Group:
    """Suspects that are tested together, until each has got `num_steps` tokens further."""

    members: list[Request]
    num_steps: int = 1
    num_failures: int = 0  # of a group of one request
    waits_for_pause: bool = False  # it has cost a worker
    # Request id -> tokens beyond which it is cleared.
    thresholds: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin the test anew: only tokens from now on count."""
        more = self.num_steps - 1
        self.thresholds = {request.request_id: _count_known(request) + more for request in self.members}

    def has_cleared(self, request: Request) -> bool:
        """Whether this member has passed, or has ended."""
        return self._has_passed(request) or request.finish_reason is not None

    def was_aborted(self, request: Request) -> bool:
        """Whether its client has ended it before it passed."""
        return request.finish_reason is FinishReason.ABORT and not self._has_passed(request)

    def _has_passed(self, request: Request) -> bool:
        return request.num_output_tokens > self.thresholds[request.request_id]


@dataclass(frozen=True, slots=True)
class _Accused:
    """A request at the time when a step of it took too long, or killed the worker."""

    num_tokens: int
    num_steps: int  # of the test that followed


class Blame:
    """At rest until something fails; then `is_searching` until every suspect is convicted or cleared."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[_Group] = []  # the last one is under test, or is to be tested next
        self._must_begin = False  # its test begins once no step is in flight
        self._held_since = math.inf  # when the others began to wait
        self._owes_pause = False  # a test has cost a worker since then
        self._is_paused = False  # the others run before the next test
        self._paused_until = math.inf  # inf until there is a worker again
        self._died_at: dict[str, int] = {}  # requests in flight at the last death -> their output tokens
        self._num_deaths = 0  # since the last good step
        self._accused: dict[Request, _Accused] = {}  # remembered suspects
        self._was_aborted = False  # a suspect, which may have been the culprit
        self._must_reset = False  # the worker's rows are void

    @property
    def is_searching(self) -> bool:
        """Whether there are suspects."""
        return bool(self._groups)

    @property
    def explains_deaths(self) -> bool:
        """False after more deaths than requests can explain."""
        return self._num_deaths <= MAX_DEATHS

    @property
    def alone(self) -> str | None:
        """The request that is tested alone, None if none is. The next step holds nothing else."""
        if not self.is_testing or len(self._groups[-1].members) != 1:
            return None
        return self._groups[-1].members[0].request_id

    @property
    def is_testing(self) -> bool:
        """Whether the next step holds suspects only."""
        return bool(self._groups) and not self._must_begin

    @property
    def must_wait(self) -> bool:
        """Whether no step may be formed: a test begins or ends once those in flight are answered."""
        if not self._groups or not self._scheduler.in_flight:
            return False
        if self._is_paused:
            return self._now >= self._paused_until
        return self._must_begin or self._has_cleared_group

    @property
    def next_test_at(self) -> float | None:
        """When a pause ends, by the monotonic clock; None without one, or while steps are in flight."""
        is_known = self._is_paused and self._paused_until < math.inf
        return self._paused_until if is_known and not self._scheduler.in_flight else None

    def add(self, request: Request) -> None:
        """Let a new request wait. One with which several engine cores in a row were lost is tested alone,
        after the present groups.
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
        """A step with `suspects` has raised: all wait again. Returns the culprit once it is known, which the
        caller ends.
        """
        self._preempt_all()
        culprit, parts = self._judge(self._groups.pop() if self.is_testing else _Group(suspects), 2)
        self._groups += reversed(parts)
        self._begin_test()
        return culprit

    def take_death(self, suspects: list[Request], accused: list[Request]) -> Request | None:
        """A worker has died with `suspects` in flight: as `take_failure`; the next worker has no rows.

        `accused`: suspects whatever they have got since the death before, of which some may have ended.
        """
        self._preempt_all()
        self._must_reset = False
        self._num_deaths += 1
        if self.is_testing:
            if not any(request in suspects for request in self._groups[-1].members):
                self._begin_test()  # none of its steps was in flight
                return None
            return self._take_death_in_test(self._groups.pop())
        if accused:
            self._suspect_accused(accused)
        else:
            died_at = self._died_at
            stuck = [r for r in suspects if died_at.get(r.request_id) == r.num_output_tokens]
            self._suspect(stuck, were_alone=len(suspects) == 1)
        self._died_at = {request.request_id: request.num_output_tokens for request in suspects}
        if self._groups:
            self._begin_test()
            self._owes_pause = True
        return None

    def explains(self, accused: list[Request]) -> bool:
        """Whether their step narrows a search: one of them is remembered, or a suspect was aborted."""
        is_known = any(r in self._accused or r.finish_reason is FinishReason.ABORT for r in accused)
        return is_known or bool(accused and self._was_aborted)

    def take_shortage(self) -> None:
        """A step was too large for the device's memory: all running requests wait, and none is suspected."""
        self._preempt_all()
        self.note_progress()

    def note_step(self) -> None:
        """A step went well, and its tokens were accepted."""
        self._num_deaths = 0
        self.note_progress()

    def note_progress(self) -> None:
        """Requests have got tokens or have ended. Once no step is in flight, the next test begins if the
        group under test is cleared.
        """
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
        """Whether the worker's rows are void, once: it is to be sent ResetRows before the next step.

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
        """Test its parts again after all others."""
        culprit, parts = self._judge(failed, _NUM_PARTS)
        for part in parts:
            part.waits_for_pause = True
        self._groups[:0] = reversed(parts)
        if culprit is not None:
            self._accused.clear()
        # Groups that have not failed are spared tests that are longer than this one.
        most = failed.num_steps
        self._groups = [group for group in self._groups if group.num_steps <= most or group.waits_for_pause]
        self._owes_pause = True
        self._begin_test_or_pause()
        return culprit

    def _suspect_accused(self, accused: list[Request]) -> None:
        """Suspect all of them; each may have been the cause before, too, and then is tested for longer."""
        self._was_aborted = False
        self._accused = {r: before for r, before in self._accused.items() if r.finish_reason is None}
        by_length: dict[int, list[Request]] = {}  # tests of about the same length are one
        for request in drop_finished(accused):
            num_steps = 1
            if (before := self._accused.get(request)) is not None:
                num_steps = 2 * max(request.num_output_tokens - before.num_tokens, before.num_steps)
            self._accused[request] = _Accused(request.num_output_tokens, num_steps)
            by_length.setdefault(num_steps.bit_length(), []).append(request)
        for _, members in sorted(by_length.items(), reverse=True):
            num_steps = max(self._accused[request].num_steps for request in members)
            self._suspect(members, num_steps, were_alone=len(accused) == 1)
        if any(request.finish_reason is FinishReason.ABORT for request in accused):
            self._accused.clear()  # it is taken for the culprit

    def _suspect(self, members: list[Request], num_steps: int = 1, *, were_alone: bool) -> None:
        """Test requests with which a worker was lost next. `were_alone`: no others were in flight, so that
        the loss counts against a single one as a failed test does.
        """
        _, parts = self._judge(_Group(members, num_steps), _NUM_PARTS, were_alone=were_alone)
        self._groups += reversed(parts)

    def _judge(
        self, group: _Group, num_parts: int, *, were_alone: bool = True
    ) -> tuple[Request | None, list[_Group]]:
        """`group` has failed. Returns the culprit, or the parts that are to be tested."""
        members = sorted(drop_finished(group.members), key=_find_suspicion)
        num_failures = group.num_failures + were_alone if len(members) == 1 else 0
        if num_failures == FAILURES_ALONE:
            return members[0], []
        if group.num_steps > 1:
            num_parts = max(2, min(num_parts, _MAX_TEST_STEPS // group.num_steps))
        size = -(-len(members) // num_parts) or 1
        parts = [members[start : start + size] for start in range(0, len(members), size)]
        return None, [_Group(part, group.num_steps, num_failures) for part in parts]

    def _begin_test_or_pause(self) -> None:
        """Let all others run before requests that have cost a worker are tested again."""
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
        """Drop cleared members and empty groups. A suspect that was aborted is taken for the culprit."""
        for group in self._groups:
            if any(map(group.was_aborted, group.members)):
                self._was_aborted = True
                self._accused.clear()
            group.members = [request for request in group.members if not group.has_cleared(request)]
        self._groups = [group for group in self._groups if group.members]

    def _begin_test(self) -> None:
        """Let only the last group's members run, or all requests if there is no group."""
        if self._is_paused and self._paused_until < math.inf:
            self._held_since, self._owes_pause = math.inf, False
        self._must_begin = self._is_paused = False
        self._held_since = min(self._held_since, self._now)
        self._drop_cleared()
        if not self._groups:
            self._held_since, self._owes_pause = math.inf, False
            self._scheduler.policy.run_all()
            return
        self._groups[-1].restart()
        self._scheduler.policy.run_only(self._groups[-1].members)

    @property
    def _now(self) -> float:
        return self._scheduler.policy.monotonic()

    @property
    def _is_pause_over(self) -> bool:
        """A pause also ends when nothing is left to run in it."""
        has_others = bool(self._scheduler.running or self._scheduler.policy.waiting)
        return not self._is_paused or self._now >= self._paused_until or not has_others

    @property
    def _has_cleared_group(self) -> bool:
        """Whether the group under test has passed."""
        return self.is_testing and all(map(self._groups[-1].has_cleared, self._groups[-1].members))


def _find_suspicion(request: Request) -> tuple[bool, bool, float]:
    """Greater for a likelier culprit: one that brings a kind of program, or is new."""
    has_program = bool(request.grammar or request.extra_args)
    return has_program, not request.num_output_tokens, request.arrival_time


def _count_known(request: Request) -> float:
    """Tokens beyond which a request under test is cleared."""
    return request.num_output_tokens
