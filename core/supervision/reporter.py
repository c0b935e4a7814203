"""Reporter: tells the process that starts a daemon how the start goes."""

from __future__ import annotations

import contextlib
import os

import msgspec

from ...ipc.daemon.daemon_state import ReadyReport, SupervisorReport


class Reporter:
    """Writes reports to what was standard output, a line each.

    Children must not inherit that: its end-of-file says that this process has ended.
    """

    def __init__(self) -> None:
        self._fd: int | None = os.dup(1)
        os.dup2(2, 1)

    def report(self, report: SupervisorReport) -> None:
        """Say it, if somebody still listens. Nothing is said after the start."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        if isinstance(report, ReadyReport):
            os.close(self._fd)
            self._fd = None
