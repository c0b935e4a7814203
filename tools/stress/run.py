"""One stress run: clients, kills and the checks at its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...ipc.errors import QuireError
from .asks import ClientPlan
from .checks import check_records
from .kills import Kill, KillPace, Role, Strike
from .line_process import READY_TIMEOUT_S, ClientProcess, all_ready
from .noise import Noise
from .record import Golden, Record
from .samples import Sample, Sampler
from .site import Site
from .victims import Victims
from .waiting import wait_until

_FIND_TIMEOUT_S = 30.0  # for a process to be killed to be there again
_PROGRESS_TIMEOUT_S = 60.0  # for requests to end after a kill


@dataclass(slots=True)
class StressResult:
    """What a run has seen. `broken` are the invariants that do not hold, a line each."""

    started_at: float = 0.0
    duration_s: float = 0.0
    records: list[Record] = field(default_factory=list[Record])
    strikes: list[Strike] = field(default_factory=list[Strike])
    samples: list[Sample] = field(default_factory=list[Sample])
    noise: dict[str, int] = field(default_factory=dict[str, int])
    num_lost_clients: int = 0  # of those that are there to be killed
    broken: list[str] = field(default_factory=list[str])
    daemon_log: str = ""  # of a run in which something broke


class Killer:
    """Does what a schedule says, as soon as the engine's limits allow."""

    def __init__(self, site: Site, victims: Victims | None) -> None:
        self._site = site
        self._victims = victims
        self._pace = KillPace(site.recovery, site.num_engines)
        self.strikes: list[Strike] = []

    def run(
        self,
        kills: Sequence[Kill],
        start: float,
        is_over: Callable[[], bool],
        count_ended: Callable[[], int],
    ) -> None:
        """All of them, in their order; ends early when the load is over. `count_ended`: requests by now.

        What the pace delays delays all that follow: each kill is to be felt alone. Raises QuireError when no
        request ends for a long time.
        """
        num_ended = 0  # at the kill before
        for kill in kills:
            if kill.after_ended is not None:
                self._await_progress(num_ended + kill.after_ended, is_over, count_ended)
                start = time.monotonic()
            now = time.monotonic()
            wait_s = max(0.0, start + kill.due_s - now)
            delay_s = max(0.0, self._pace.find_delay_s(kill.role, now) - wait_s)
            start += delay_s
            if wait_until(is_over, wait_s + delay_s):
                break
            is_core_ready = self._site.is_ready
            self.strikes.append(self._strike(kill))
            self._pace.note(kill.role, time.monotonic(), is_core_ready)
            num_ended = count_ended()

    def _await_progress(
        self, num_ended: int, is_over: Callable[[], bool], count_ended: Callable[[], int]
    ) -> None:
        if not wait_until(lambda: is_over() or count_ended() >= num_ended, _PROGRESS_TIMEOUT_S):
            missing = num_ended - count_ended()
            raise QuireError(f"{_PROGRESS_TIMEOUT_S:g} s after a kill {missing} requests too few have ended")

    def _strike(self, kill: Kill) -> Strike:
        """Send the signal. Raises QuireError when there is no such process for a long time."""
        name = kill.method.partition("+")[0]
        deadline = time.monotonic() + _FIND_TIMEOUT_S
        while time.monotonic() < deadline:
            wait_until(lambda: self._find_pids(kill.role), _FIND_TIMEOUT_S)
            pids = self._find_pids(kill.role)
            pid = pids[kill.which % len(pids)] if pids else None
            if pid is not None and _send_signal(pid, signal.Signals[f"SIG{name}"]):
                strike = Strike(kill, pid, time.monotonic())
                if kill.method == "STOP+CONT":
                    select.select([], [], [], kill.stop_s)  # the length of the stop is the point
                    _send_signal(pid, signal.SIGCONT)
                self._site.note_killed(kill.role, pid)
                return strike
        raise QuireError(f"there was no {kill.role} process to kill for {_FIND_TIMEOUT_S:g} s")

    def _find_pids(self, role: Role) -> list[int]:
        if role != "client":
            return self._site.find_pids(role)
        return [] if self._victims is None else self._victims.pids


def run_load(
    site: Site,
    plans: Sequence[ClientPlan],
    kills: Sequence[Kill],
    golden: Sequence[Golden],
    noise_seed: int | None = None,
    victims: Victims | None = None,
) -> StressResult:
    """Run the plans' clients at once, do the kills meanwhile, check what came out.

    `victims` are the clients that may be killed, if there are any.
    """
    result = StressResult()
    open_before = site.count_open_files()
    clients = [ClientProcess(plan) for plan in plans]
    sampler = Sampler(site)
    noise = None if noise_seed is None else Noise(site, noise_seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(all_ready(clients))
        for beside in (sampler, noise, victims):
            if beside is not None:
                stack.enter_context(beside)
        result.started_at = time.monotonic()
        for one in clients:
            one.begin()
        killer = Killer(site, victims)
        try:
            killer.run(
                kills,
                result.started_at,
                lambda: not any(one.is_running for one in clients),
                lambda: sum(len(one.items) for one in clients),
            )
        except QuireError as error:
            result.broken.append(f"{error}; the daemon's last words: {site.read_last_words()}")
        result.strikes = killer.strikes
        for one in clients:
            if one.plan.is_endless:
                one.close_input()
        for one in clients:
            result.broken += _end_client(one, golden)
    result.duration_s = time.monotonic() - result.started_at
    result.samples = sampler.samples
    if noise is not None:
        result.noise = {"connections": noise.num_connections, "junk messages": noise.num_junk_messages}
    result.records = [record for one in clients for record in one.items]
    if victims is not None:
        result.num_lost_clients = victims.num_lost
        result.broken += check_records([], victims.records, golden)
        result.records += victims.records
    result.broken += site.check_settled(open_before)
    if result.broken:
        result.daemon_log = site.read_log()
    return result


def _end_client(client: ClientProcess, golden: Sequence[Golden]) -> list[str]:
    """Wait for its last record; what is broken."""
    timeout_s = _find_longest_s(client.plan)
    if (sent := client.end(timeout_s)) is not None:
        return check_records(sent.numbers, client.items, golden)
    why = f"within {timeout_s:g} s after the last kill, with {len(client.items)} requests ended"
    return [f"the {client.plan.kind} client did not come to its end {why}"]


def _find_longest_s(plan: ClientPlan) -> float:
    """How long a plan's client may go on: each request has its time, the rest is for a bad moment."""
    last_s = max((arrival.due_s for arrival in plan.arrivals), default=0.0)
    rounds = 1 if plan.max_concurrency is None else -(-len(plan.arrivals) // plan.max_concurrency)
    return last_s + rounds * plan.timeout_s + READY_TIMEOUT_S


def _send_signal(pid: int, number: signal.Signals) -> bool:
    """False if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
