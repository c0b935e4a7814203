"""Which process is to die when, and how soon one of its kind may die again. Pure.

An engine that keeps losing processes gives up, as it should: a core after so many deaths of its worker within
so many seconds, a supervisor after so many of its core, as its configuration says, and a server after 5 of
its HTTP processes in 60 s. Clients may die as often as they like. A KillPace stays within that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...ipc.processes.restarts import LOSS_WINDOW_S, MAX_LOSSES
from ...ipc.spec.config import RecoveryConfig

Role = Literal["core", "worker", "http", "client", "actor", "node"]
SITE_ROLES: tuple[Role, ...] = ("core", "worker", "http")
ROLES: tuple[Role, ...] = (*SITE_ROLES, "client")
RAY_ROLES: tuple[Role, ...] = ("actor", "node")  # of a run on Ray; each takes a worker along
Method = Literal["KILL", "TERM", "STOP", "STOP+CONT"]
METHODS: tuple[Method, ...] = ("KILL", "TERM", "STOP", "STOP+CONT")
_MAX_STOP_S = 2.0
_NO_LIMIT = 1 << 30
_EARLY_SHARE = 0.25
_START_S, _SPREAD_S = 2.0, 0.5
_ENOUGH_ENDED = 8  # requests: with 64 at once, a request lives through about six kills
_MARGIN_S = 2.0  # a death is counted when it is seen, which is after the kill
_HTTP_MARGIN_S = 10.0  # and after SIGTERM when its last request has ended: slow readers take 5 s


@dataclass(frozen=True, slots=True)
class Kill:
    """One signal that is due. `which` chooses among processes of the role; STOP+CONT goes on after stop_s.

    due_s counts from the start of the load; with `after_ended` from when that many requests have ended since
    the kill before, so that on a slow machine too there is something to lose.
    """

    due_s: float
    role: Role
    method: Method
    which: int
    stop_s: float
    after_ended: int | None = None


@dataclass(slots=True)
class Strike:
    """A Kill that was done, at a time.monotonic."""

    kill: Kill
    pid: int
    at: float


@dataclass(slots=True)
class KillPace:
    """When the next of each role may die, of an engine with this `recovery`.

    Of several engines all deaths count as if they were one's: each then has fewer than it may.
    """

    recovery: RecoveryConfig
    num_engines: int = 1
    _at: dict[Role, list[float]] = field(default_factory=dict[Role, list[float]])

    def allows(self, role: Role) -> bool:
        """Whether one of this role may die at all."""
        return all(self._find_limit(one)[0] for one in _list_counted(role))

    def find_delay_s(self, role: Role, now: float) -> float:
        """Seconds until one more death of this role, which is allowed, ends nothing; 0.0: at once."""
        return max(self._find_own_delay_s(one, now) for one in _list_counted(role))

    def note(self, role: Role, now: float, is_core_ready: bool) -> None:
        """One was killed. A new core counts its workers' deaths from none."""
        role = "worker" if role in RAY_ROLES else role
        self._at.setdefault(role, []).append(now)
        if role == "worker" and not is_core_ready:
            self._at.setdefault("core", []).append(now)
        if role == "core" and self.num_engines == 1:
            self._at.pop("worker", None)

    def _find_own_delay_s(self, role: Role, now: float) -> float:
        limit, window_s = self._find_limit(role)
        deaths = self._at.get(role, [])
        if len(deaths) < limit:
            return 0.0
        margin_s = _HTTP_MARGIN_S if role == "http" else _MARGIN_S
        return max(0.0, deaths[-limit] + window_s + margin_s - now)

    def _find_limit(self, role: Role) -> tuple[int, float]:
        recovery = self.recovery
        match role:
            case "core":
                return recovery.max_core_restarts, recovery.restart_window_s
            case "worker" | "actor" | "node":
                return recovery.max_worker_restarts, recovery.restart_window_s
            case "http":
                return MAX_LOSSES, LOSS_WINDOW_S
            case "client":
                return _NO_LIMIT, 0.0


def _list_counted(role: Role) -> tuple[Role, ...]:
    """As what a death of this role may count: a worker that dies before its core is ready ends that too."""
    return ("worker", "core") if role in ("worker", *RAY_ROLES) else (role,)


def draw_kills(
    seed: int, roles: Sequence[Role], methods: Sequence[Method], interval_s: float, duration_s: float
) -> list[Kill]:
    """One kill in each interval, at any moment of it; roles and methods take turns in a drawn order.

    What is Ray's is killed, and not stopped: what it does then is not ours.
    """
    rng = random.Random(f"kills/{seed}")
    pairs: list[tuple[Role, Method]] = [
        (role, method) for role in roles for method in methods if role not in RAY_ROLES or method == "KILL"
    ]
    kills: list[Kill] = []
    while pairs and (len(kills) + 1) * interval_s <= duration_s:
        if len(kills) % len(pairs) == 0:
            rng.shuffle(pairs)
        role, method = pairs[len(kills) % len(pairs)]
        due_s = (len(kills) + rng.random()) * interval_s
        kills.append(Kill(due_s, role, method, rng.randrange(64), rng.uniform(0.1, _MAX_STOP_S)))
    return kills


def draw_exact_kills(seed: int, counts: dict[Role, int]) -> list[Kill]:
    """That many SIGKILLs of each role, in a drawn order.

    Most come at any moment of half a second once requests have ended again, some at any moment of the start
    that the kill before made necessary.
    """
    rng = random.Random(f"exact kills/{seed}")
    roles: list[Role] = [role for role, count in counts.items() for _ in range(count)]
    rng.shuffle(roles)
    kills: list[Kill] = []
    for role in roles:
        is_early = rng.random() < _EARLY_SHARE
        due_s = rng.uniform(0.0, _START_S if is_early else _SPREAD_S)
        kills.append(Kill(due_s, role, "KILL", rng.randrange(64), 0.0, 0 if is_early else _ENOUGH_ENDED))
    return kills
