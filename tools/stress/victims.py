"""Clients that are there to be killed: an AsyncLLM and an LLM, each followed by another when it is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Self

import psutil

from ...ipc.errors import QuireError
from .asks import ClientPlan
from .beside import Beside
from .line_process import ClientProcess
from .record import Record

_MAX_STOPPED_S = 3.0  # the engine has dropped it by then; SIGCONT comes sooner if it comes


class Victims(Beside):
    """One client a plan, kept running. The plans are endless.

    `records` are of the requests that had ended when their client was lost, or at the end.
    """

    period_s = 0.1

    def __init__(self, plans: Sequence[ClientPlan]) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.num_lost = 0
        self._plans = plans
        self._running: list[ClientProcess] = []
        self._stopped_since: dict[int, float] = {}

    @property
    def pids(self) -> list[int]:
        """Those that run now."""
        return [one.pid for one in self._running if one.is_running]

    def __enter__(self) -> Self:
        for plan in self._plans:
            self._begin(plan)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for one in self._running:
            self._bury(one)

    def act(self) -> None:
        for one in [one for one in self._running if self._is_lost(one)]:
            self._bury(one)
            self._running.remove(one)
            self.num_lost += 1
            self._begin(one.plan)

    def _begin(self, plan: ClientPlan) -> None:
        client = ClientProcess(plan)
        self._running.append(client)
        with contextlib.suppress(QuireError):  # not ready in time: then it is not running, hence lost
            client.wait_until_ready()
            client.begin()

    def _is_lost(self, client: ClientProcess) -> bool:
        """Whether it has ended, or is stopped for good."""
        if not client.is_running:
            return True
        with contextlib.suppress(psutil.Error):
            if psutil.Process(client.pid).status() == psutil.STATUS_STOPPED:
                since = self._stopped_since.setdefault(client.pid, time.monotonic())
                return time.monotonic() - since > _MAX_STOPPED_S
        self._stopped_since.pop(client.pid, None)
        return False

    def _bury(self, client: ClientProcess) -> None:
        client.kill()
        self.records += client.items
