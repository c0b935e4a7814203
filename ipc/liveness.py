"""SilenceWatch: when to ask a process whether it is there, and when to give it up. Pure: time is passed in.

Whoever owns an engine core watches it this way. ZeroMQ's heartbeats cannot do it: they come from the core's
side only (sockets.py says why), and a hung main thread would not stop them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from .process_state import is_computing


class Verdict(Enum):
    """What the owner of a silent process is to do."""

    WAIT = auto()
    ASK = auto()  # send it a PING
    DUMP = auto()  # have it write its threads' stacks
    KILL = auto()


# Seconds of silence. A stopped process is to be gone within 2 s; one that computes may only be late: 256
# prompts of 100,000 tokens that arrive at once keep a core busy for seconds. It is looked at again and again.
ASK_AFTER_S, DUMP_AFTER_S, KILL_AFTER_S, KILL_BUSY_AFTER_S = 0.7, 1.6, 1.8, 10.0
LOOK_INTERVAL_S = 0.25
_STAGES = ((ASK_AFTER_S, Verdict.ASK), (DUMP_AFTER_S, Verdict.DUMP), (KILL_AFTER_S, Verdict.KILL))
LISTEN_TIMEOUT_S = 15.0  # a core that was started and does not listen by then; it takes 0.3 s if left alone
_LATE_S = 0.5  # a watcher that comes this late was away itself, and has not listened


class SilenceWatch:
    """One process, watched from `start` to `stop`. `is_busy` says whether it computes now."""

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._heard_at: float | None = None
        self._stage = 0
        self._look_at = 0.0  # in the last stage, when it was busy
        self._was_busy = False  # at the last look

    @property
    def next_check_at(self) -> float | None:
        """When `check` has something to say, None while nothing is watched. Monotonic clock, as all times."""
        if self._heard_at is None:
            return None
        return max(self._look_at, self._heard_at + _STAGES[self._stage][0])

    def start(self, now: float) -> None:
        """It listens from now on."""
        self._begin(now)

    def stop(self) -> None:
        """It is gone, or nobody listens to it for a while."""
        self._heard_at = None

    def note_heard(self, now: float) -> None:
        """It has said something, whatever it was."""
        if self._heard_at is not None:
            self._begin(now)

    def _begin(self, heard_at: float) -> None:
        self._heard_at = heard_at
        self._stage = 0
        self._look_at = 0.0
        self._was_busy = False

    def check(self, now: float) -> Verdict:
        """What to do now; each verdict comes once in a silence, and nothing after KILL."""
        due_at = self.next_check_at
        if due_at is None or now < due_at:
            return Verdict.WAIT
        if now - due_at > _LATE_S:  # begin anew: it may have answered while nobody listened
            self._begin(now - ASK_AFTER_S)
        verdict = _STAGES[self._stage][1]
        if verdict is not Verdict.KILL:
            self._stage += 1
            return verdict
        if self._may_be_late(now):
            self._look_at = now + LOOK_INTERVAL_S
            return Verdict.WAIT
        self.stop()
        return Verdict.KILL

    def _may_be_late(self, now: float) -> bool:
        """Whether it is busy, or was at the last look: then its answer may be on its way."""
        assert self._heard_at is not None
        is_busy, was_busy = self._is_busy(), self._was_busy
        self._was_busy = is_busy
        return now - self._heard_at < KILL_BUSY_AFTER_S and (is_busy or was_busy)


class WatchedChild(Protocol):
    """The child process that a ChildWatch is of; ChildProcess is one."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def dump_stacks(self) -> None:
        """Have it write what it is doing into its log."""
        ...

    def kill(self, because: str) -> None:
        """End it, as if it had crashed."""
        ...


class ChildWatch(SilenceWatch):
    """A SilenceWatch that does what silence calls for, all but the asking. `child` has just been started."""

    def __init__(self, child: WatchedChild, now: float) -> None:
        super().__init__(lambda: is_computing(child.pid))
        self._child = child
        self._must_listen_by: float | None = now + LISTEN_TIMEOUT_S

    def note_listening(self) -> None:
        """The child can be reached."""
        self._must_listen_by = None

    def check_listening(self, now: float) -> None:
        """End a child that was to be reached long ago."""
        if self._must_listen_by is not None and now > self._must_listen_by:
            self._child.kill(f"it did not listen within {LISTEN_TIMEOUT_S:g} s")

    def look(self, now: float) -> bool:
        """Dump or kill the child if that is due. True: send it a PING."""
        verdict = self.check(now)
        if verdict is Verdict.DUMP:
            self._child.dump_stacks()
        elif verdict is Verdict.KILL:
            self._child.kill("it did not answer")
        return verdict is Verdict.ASK
