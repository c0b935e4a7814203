"""What the kernel says that a process does (proc(5)): whether a silent one is starved, stopped or stuck."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_COMPUTING_STATES = frozenset("RD")  # running or ready to, and in a system call that nothing interrupts
_STOPPED_STATE = "T"  # by a signal; by a debugger it would be t
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME = 11  # among the fields behind the name; stime follows


def is_computing(pid: int) -> bool:
    """Whether any of its threads runs or is ready to. So is one that gets no processor, and one that holds
    the interpreter's lock while the main thread waits for it.
    """
    return not _COMPUTING_STATES.isdisjoint(_read_states(pid))


def read_cpu_time_s(pid: int) -> float:
    """Seconds that its threads have computed so far, those in system calls included; 0.0 of none."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
        return sum(map(int, fields[_UTIME : _UTIME + 2])) / _TICKS_PER_S
    return 0.0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it: it neither computes nor fails, until it is continued."""
    return _STOPPED_STATE in _read_states(pid)


def has_handler(pid: int, number: signal.Signals) -> bool:
    """Whether it does something of its own on this signal (SigCgt)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _read_states(pid: int) -> set[str]:
    """The states of its threads; none if it has ended and nobody knows it any more."""
    states: set[str] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # this thread has ended
                # The name is in parentheses and may hold anything; the state is the letter after it.
                states.add(task.joinpath("stat").read_text(errors="replace").rpartition(") ")[2][:1])
    return states
