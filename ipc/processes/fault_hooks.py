"""Fault hooks: named points in core and worker at which something can be made to go wrong, for tests.

A specification is a comma-separated list of `point:action@count`: at the count-th time (default 1, counted in
each process) that the point is reached, the action happens. A process in the place of a lost one has only
the hooks that end in `*`: `worker.execute:hang@5*` hangs every worker, each at its fifth step. Of several
ranks `worker.execute#1:hang` is rank 1's only. They come with EngineConfig.fault_hooks; no message can ask
for one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from enum import Enum

import msgspec

from ..errors import ConfigError

SLOW_S = 0.3  # how long `slow` takes


class Action(Enum):
    """What can go wrong."""

    RAISE = "raise"
    HANG = "hang"  # for ever
    SEGFAULT = "segfault"
    EXIT = "exit"
    SLOW = "slow"
    OOM = "oom"  # as if memory had run out
    NAN = "nan"  # a row of logits; done by the caller
    CORRUPT = "corrupt"  # a frame that is about to be sent


_ANYWHERE = (Action.RAISE, Action.HANG, Action.SEGFAULT, Action.EXIT, Action.SLOW)

# Every point of the production code, by process, and what can be asked for there.
POINTS: dict[str, tuple[Action, ...]] = {
    "core.bind": _ANYWHERE,  # before it listens
    "core.start": _ANYWHERE,  # as each phase of the start begins, the worker's included
    "core.schedule": _ANYWHERE,  # before a step is formed
    "core.step_frame": (Action.CORRUPT,),  # to the worker
    "core.outputs_frame": (Action.CORRUPT,),  # to a client
    "worker.start": _ANYWHERE,  # as each phase of the start begins
    "worker.execute": (*_ANYWHERE, Action.OOM),  # before a step is computed
    "worker.logits": (Action.NAN,),  # of a step's first row; the start's warm-up reaches it twice
    "worker.vector": (Action.NAN,),  # of a step's first row, if some of its rows are pooled
    "worker.result_frame": (Action.CORRUPT,),  # to the core
}

_HOOK = re.compile(r"([a-z]+\.[a-z_]+)(?:#(\d{1,2}))?:([a-z]+)(?:@([1-9]\d{0,8}))?(\*?)")


class FaultInjected(RuntimeError):
    """What `raise` raises."""


class Hook(msgspec.Struct, frozen=True):
    """One entry of a specification."""

    point: str
    action: Action
    count: int
    is_lasting: bool
    rank: int | None = None  # None: of each

    def __str__(self) -> str:
        of_rank = "" if self.rank is None else f"#{self.rank}"
        return f"{self.point}{of_rank}:{self.action.value}@{self.count}{'*' if self.is_lasting else ''}"


def parse_fault_hooks(spec: str) -> list[Hook]:
    """The hooks of a specification. Raises ConfigError with what is allowed."""
    if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("fault_hooks", spec, "a text")
    return [_parse_hook(part.strip()) for part in spec.split(",")] if spec else []


def keep_lasting(spec: str) -> str:
    """The specification for a process that takes a lost one's place."""
    return ",".join(str(hook) for hook in parse_fault_hooks(spec) if hook.is_lasting)


def make_fault_hooks(spec: str, process: str, rank: int = 0) -> FaultHooks | None:
    """The hooks of `process` ("core" or "worker"); None if it has none, so that a point costs one test."""
    hooks = [hook for hook in parse_fault_hooks(spec) if hook.point.startswith(f"{process}.")]
    hooks = [hook for hook in hooks if hook.rank in (None, rank)]
    return FaultHooks(hooks) if hooks else None


class FaultHooks:
    """The hooks of one process, with how often each point was reached."""

    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks
        self._num_reached: Counter[str] = Counter()

    def reach(self, point: str) -> bool:
        """Do what is due at `point`. True if a NAN or CORRUPT is due, which the caller does."""
        self._num_reached[point] += 1
        is_due = False
        for hook in self._hooks:
            if hook.point == point and hook.count == self._num_reached[point]:
                is_due = _do(hook) or is_due
        return is_due

    def corrupt(self, point: str, frames: tuple[bytes]) -> tuple[bytes]:
        """The frames to send at `point`: half of the message when CORRUPT is due."""
        if not self.reach(point):
            return frames
        return (frames[0][: max(1, len(frames[0]) // 2)],)


def _do(hook: Hook) -> bool:
    match hook.action:
        case Action.RAISE:
            raise FaultInjected(f"fault hook {hook}")
        case Action.OOM:
            raise MemoryError(f"fault hook {hook}")
        case Action.HANG:
            while True:
                time.sleep(3600)
        case Action.SEGFAULT:
            signal.raise_signal(signal.SIGSEGV)
        case Action.EXIT:
            from .process import EXIT_CRASHED

            os._exit(EXIT_CRASHED)
        case Action.SLOW:
            time.sleep(SLOW_S)
        case Action.NAN | Action.CORRUPT:
            return True
    return False


def _parse_hook(text: str) -> Hook:
    match = _HOOK.fullmatch(text)
    if match is None:
        raise ConfigError("fault_hooks", text, "point:action@count, such as worker.execute:hang@5")
    point, rank, name, count, star = match.groups()
    if point not in POINTS:
        raise ConfigError("fault_hooks", text, f"a point of {', '.join(POINTS)}")
    allowed = {action.value: action for action in POINTS[point]}
    if name not in allowed:
        raise ConfigError("fault_hooks", text, f"at {point} an action of {', '.join(allowed)}")
    return Hook(point, allowed[name], int(count or 1), bool(star), None if rank is None else int(rank))
