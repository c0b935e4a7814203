"""The supervisor's death, which ends a daemon: clients are told, nobody stays, the next start takes over."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import psutil

from .asks import ClientPlan
from .checks import check_records
from .line_process import ClientProcess, all_ready
from .record import Golden, Record
from .site import Site
from .waiting import wait_until

_RUN_TIMEOUT_S = 30.0  # for each client's first request
_TOLD_WITHIN_S = 5.0
_GONE_WITHIN_S = 5.0  # 2 s if left alone
_DEAD = "EngineDeadError: "


def kill_supervisor(site: Site, plans: Sequence[ClientPlan], golden: Sequence[Golden]) -> list[str]:
    """Run the plans, which are endless, kill the supervisor of a site of one's own, and start another.

    Returns what is broken. The site's server ends; a daemon of the same name runs afterwards.
    """
    clients = [ClientProcess(plan) for plan in plans]
    with all_ready(clients):
        for client in clients:
            client.begin()
        wait_until(lambda: all(client.items for client in clients), _RUN_TIMEOUT_S)
        processes = [psutil.Process(pid) for _, pid in site.list_processes()]
        site.supervisor.kill()
        with contextlib.suppress(ChildProcessError):  # start_daemon made it a child of this process
            os.waitpid(site.supervisor.pid, 0)
        killed_at = time.monotonic()
        told_within_s = _TOLD_WITHIN_S + site.notice_s
        wait_until(lambda: not any(client.is_running for client in clients), told_within_s)
        broken = [
            line for client in clients for line in _check_told(client, killed_at, told_within_s, golden)
        ]
        wait_until(lambda: not _find_alive(processes), _GONE_WITHIN_S)
        broken += [f"{who} outlived the supervisor" for who in _find_alive(processes)]
    return broken + _check_next(site, plans[0], golden)


def _check_told(
    client: ClientProcess, killed_at: float, told_within_s: float, golden: Sequence[Golden]
) -> list[str]:
    kind = client.plan.kind
    if client.is_running:
        return [f"the {kind} client had no EngineDeadError {told_within_s:g} s after the supervisor's death"]
    told = [one for one in client.items if one.error.startswith(_DEAD) and one.ended_at >= killed_at]
    if not told:
        return [f"no request of the {kind} client ended with EngineDeadError"]
    others: list[Record] = [one for one in client.items if one not in told]
    return check_records([], others, golden)


def _find_alive(processes: Sequence[psutil.Process]) -> list[str]:
    alive: list[str] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(f"{' '.join(process.cmdline()[-2:])} (pid {process.pid})")
    return alive


def _check_next(site: Site, plan: ClientPlan, golden: Sequence[Golden]) -> list[str]:
    """A new daemon takes the dead one's directory over, and answers as that did."""
    site.start_daemon_again()
    if site.compute_golden(plan.pool) != list(golden):
        return ["the next daemon answers otherwise than the dead one did"]
    return []
