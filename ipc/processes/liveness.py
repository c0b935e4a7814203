"""Whether a process that exists also makes progress: when to ping it, when to give it up. Time is passed in.

A ChildWatch acts on one process: on its silence, and by its Deadline on answers that are overdue.
"""

from __future__ import annotations

from typing import Protocol

from .due import find_earliest

# Seconds of silence after which it is sent a PING, has to write its stacks, and is killed. A stopped process
# has to be gone within 2 s. One that computes may only be late, as 256 prompts of 100,000 tokens keep a core
# busy for seconds: it is looked at every LOOK_INTERVAL_S.
ASK_AFTER_S, DUMP_AFTER_S, KILL_AFTER_S, KILL_BUSY_AFTER_S = 0.7, 1.6, 1.8, 10.0
LOOK_INTERVAL_S = 0.25
_STAGES = (ASK_AFTER_S, DUMP_AFTER_S, KILL_AFTER_S)
_LATE_S = 0.5  # a watcher that is this late was not running itself, and may have missed an answer

_STOPPED_LOOK_INTERVAL_S = 0.5
_MAX_LOOKS_STOPPED = 3  # in a row: given up within 2 s, but not if it is stopped and continued within one
LISTEN_TIMEOUT_S = 15.0  # for a core that was started; on an idle machine it takes 0.3 s
# The part of the time without a processor that is forgiven. Not all: a system call may never return.
_STARVED_SHARE = 0.95
DUMP_GRACE_S = 0.2  # for a process to write its stacks before it is killed; 40 threads take 10 ms


class Watched(Protocol):
    """What can be watched: a ProcessHandle, or what stands for a process elsewhere."""

    @property
    def is_computing(self) -> bool: ...
    @property
    def cpu_time_s(self) -> float: ...
    @property
    def is_stopped(self) -> bool: ...
    def dump_stacks(self) -> None: ...
    def kill(self, because: str) -> None: ...


class StarvedTime:
    """How long a process was ready to run and got no processor since this was made, sampled by `look`.

    On a machine with more work than processors everything is late: at a load of 20 a core took over 15 s for
    its imports. Time in which it computes is not forgiven, so one that computes for ever is still found.
    """

    def __init__(self, process: Watched, now: float) -> None:
        self._process = process
        self._looked_at, self._cpu_time_s, self._total_s = now, process.cpu_time_s, 0.0

    def look(self, now: float, is_computing: bool) -> float:
        """Seconds so far. The process is taken to have been `is_computing` since the last look."""
        elapsed_s, self._looked_at = now - self._looked_at, now
        before_s, self._cpu_time_s = self._cpu_time_s, self._process.cpu_time_s
        if is_computing:
            starved_s = elapsed_s - (self._cpu_time_s - before_s)
            self._total_s += min(max(starved_s, 0.0), _STARVED_SHARE * elapsed_s)
        return self._total_s


class Deadline:
    """The time by which a process has to answer, and the reason that is given if it does not.

    Meanwhile the process is looked at: one that a signal has stopped is given up sooner.
    """

    def __init__(self, process: Watched) -> None:
        self._process = process
        self._starved: StarvedTime | None = None  # what does not count
        self.due_at: float | None = None  # None: no answer is due
        self._limit_at = 0.0  # `due_at` without forgiven time
        self._otherwise = ""
        self._look_at = 0.0
        self._num_looks_stopped = 0

    @property
    def next_check_at(self) -> float | None:
        """When `find_overdue` is due, None while no answer is."""
        due_at, look_at = self.due_at, self._look_at
        return look_at if due_at is not None and look_at < due_at else due_at

    def set(self, now: float, limit_s: float, otherwise: str, *, forgives_starved: bool = False) -> None:
        """Replace the deadline: an answer is due within `limit_s`, or `otherwise` is the reason.

        `forgives_starved`: time in which it is ready to run and gets no processor does not count.
        """
        self.due_at = self._limit_at = now + limit_s
        self._starved = StarvedTime(self._process, now) if forgives_starved else None
        self._otherwise = otherwise
        self._look_at = now + _STOPPED_LOOK_INTERVAL_S
        self._num_looks_stopped = 0

    def clear(self) -> None:
        """The answer has come, or is not needed any more."""
        self.due_at = None

    def find_overdue(self, now: float) -> str | None:
        """Why the process is to be given up, returned once; None if it is not."""
        if self.due_at is None:
            return None
        was_due = now >= self.due_at
        if self._starved is not None:
            self.due_at = self._limit_at + self._starved.look(now, self._process.is_computing)
        if was_due and now < self.due_at:
            self.due_at = max(self.due_at, now + _STOPPED_LOOK_INTERVAL_S)
        if now >= self.due_at:
            self.due_at = None
            return self._otherwise
        if now >= self._look_at:
            self._look_at = now + _STOPPED_LOOK_INTERVAL_S
            self._num_looks_stopped = self._num_looks_stopped + 1 if self._process.is_stopped else 0
            if self._num_looks_stopped == _MAX_LOOKS_STOPPED:
                self.due_at = None
                return "it is stopped"
        return None


class ChildWatch:
    """Watches one process from its start to its end; without progress it writes its stacks and is killed.

    It is given up when an answer is overdue (`deadline`), when it does not answer a PING (between `start` and
    `stop`), or when its owner says so (`give_up`). ZeroMQ's heartbeats would not do: only the core sends them
    (sockets.py says why), and they go on while its main thread hangs.
    """

    def __init__(self, process: Watched) -> None:
        self._process = process
        self.deadline = Deadline(process)
        self.kill_reason: str | None = None  # why it was given up
        self._kill_at: float | None = None  # when it will be killed for that; None once it was
        self._heard_at: float | None = None  # None: its silence is not watched
        self._stage = 0  # of `_STAGES`, the next one of this silence
        self._look_at = 0.0  # the next look at a busy process, in the last stage
        self._was_busy = False  # at the last look
        self._starved: StarvedTime | None = None  # since the first look

    @property
    def next_check_at(self) -> float | None:
        """When `look` is due, None if never."""
        if self.kill_reason is not None:
            return self._kill_at
        owed_at = self.deadline.next_check_at
        return owed_at if self._heard_at is None else find_earliest(self._silence_due_at, owed_at)

    @property
    def _silence_due_at(self) -> float | None:
        if self._heard_at is None:
            return None
        return max(self._look_at, self._heard_at + _STAGES[self._stage])

    def start(self, now: float) -> None:
        """Begin to watch its silence: it answers from now on."""
        self._heard_at = now
        self._stage = 0
        self._look_at = 0.0
        self._was_busy = False

    def stop(self) -> None:
        """Watch its silence no more: it is gone, or its answers are not read for a while."""
        self._heard_at = None

    def note_heard(self, now: float) -> None:
        """A message of any kind has come from it."""
        if self._heard_at is not None:
            self.start(now)

    def expect_listening(self, now: float) -> None:
        """It was started, and has to listen soon; time in which it gets no processor does not count."""
        otherwise = f"it did not listen within {LISTEN_TIMEOUT_S:g} s"
        self.deadline.set(now, LISTEN_TIMEOUT_S, otherwise, forgives_starved=True)

    def note_listening(self) -> None:
        """It listens."""
        self.deadline.clear()

    def give_up(self, because: str, now: float) -> None:
        """Have it write its stacks, and kill it DUMP_GRACE_S later. This is final."""
        if self.kill_reason is None:
            self._process.dump_stacks()
            self.stop()
            self.deadline.clear()
            self.kill_reason, self._kill_at = because, now + DUMP_GRACE_S

    def look(self, now: float) -> bool:
        """Do what is due. Returns whether to send it a PING."""
        check_at = self.next_check_at
        if check_at is None or now < check_at:
            return False
        if (overdue := self.deadline.find_overdue(now)) is not None:
            self.give_up(overdue, now)
        if self.kill_reason is not None and self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._process.kill(self.kill_reason)
        return self._check_silence(now)

    def _check_silence(self, now: float) -> bool:
        """Go a stage further if it is time, each once in a silence. Returns whether to send a PING."""
        due_at = self._silence_due_at
        if due_at is None or now < due_at:
            return False
        if now - due_at > _LATE_S:  # begin anew: it may have answered meanwhile
            self.start(now - ASK_AFTER_S)
        stage = self._stage
        if stage < len(_STAGES) - 1:
            self._stage += 1
            if stage > 0:
                self._was_busy = self._process.is_computing
                self._process.dump_stacks()
        elif self._may_be_late(now):
            self._look_at = now + LOOK_INTERVAL_S
        else:
            self.stop()
            self._process.kill("it did not answer")
        return stage == 0

    def _may_be_late(self, now: float) -> bool:
        """Whether it is busy, or was at the last look, so that its answer may be on its way."""
        assert self._heard_at is not None
        if self._starved is None or not self._look_at:
            self._starved = StarvedTime(self._process, now)
        is_busy, was_busy = self._process.is_computing, self._was_busy
        self._was_busy = is_busy
        silent_s = now - self._heard_at - self._starved.look(now, is_busy)
        return silent_s < KILL_BUSY_AFTER_S and (is_busy or was_busy)
