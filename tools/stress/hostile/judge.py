"""What a hostile run must show: ordinary streams as before, bounded memory, no process lost. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ..kills import SITE_ROLES
from ..measures import Latency, Phase, Times, measure
from ..record import Record
from ..samples import Sample
from .attacks import ATTACKS
from .plan import TurnReport

LATENCY_FACTOR = 2.0  # the fair policy's bound: the attackers' key has half of the engine
LATENCY_MARGIN_S = 0.1
SILENCE_MARGINS = 10  # of these may the longest gap gain: what freezes a process hides from a long run's p99
LOST_MARK = "; starting another"  # of the line that an owner logs when it has lost a process
_MB = 1_000_000
# How far a process may grow beyond its most in the undisturbed phase, and what may be left of it at the end.
MAX_GROWTH_BYTES = {
    "supervisor": 16 * _MB,
    "server": 16 * _MB,
    "core": 192 * _MB,
    "worker": 384 * _MB,
    "http": 384 * _MB,
}
MAX_LEFT_BYTES = {
    "supervisor": 8 * _MB,
    "server": 8 * _MB,
    "core": 64 * _MB,
    "worker": 96 * _MB,  # compiled grammars 50, a trie 8, what others leave in the heap 20
    "http": 96 * _MB,
}
MAX_HELPER_BYTES = 1024 * _MB  # in all, of a process that an HTTP process started for its work with texts
_LEAST_GAPS, _LEAST_FIRST_TOKENS = 100, 20
_MAX_LATE_S = 0.5  # that a turn may last into the next one, which is alone nevertheless
_LEAST_S = 1.5  # in which a process has been looked at for sure
MAX_CREEP_BYTES = 8 * _MB  # within the second half of the settling phase


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """A latency that is above its bound."""

    name: str
    calm_s: float  # while undisturbed
    now_s: float
    margin_s: float

    @property
    def brief(self) -> str:
        """How far above."""
        over_s = self.now_s - find_bound(self.calm_s, self.margin_s)
        return f"{self.name} by {1e3 * over_s:.0f} ms"

    @property
    def line(self) -> str:
        """With the bound and where it comes from."""
        bound_ms = 1e3 * find_bound(self.calm_s, self.margin_s)
        sum_ms = f"{LATENCY_FACTOR:g} x {1e3 * self.calm_s:.0f} + {1e3 * self.margin_s:.0f} = {bound_ms:.0f}"
        return f"ordinary streams' {self.name} is {1e3 * self.now_s:.0f} ms, at most {sum_ms} ms"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What ordinary streams felt while an attack ran alone. latency: None when it had no time alone."""

    attack: str
    latency: Latency | None
    excesses: list[Excess] = []

    @property
    def has_few_samples(self) -> bool:
        """So that a p99 would be a single wait: the median is judged."""
        one = self.latency
        return one is None or one.gaps.num < _LEAST_GAPS or one.first.num < _LEAST_FIRST_TOKENS


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the largest process of a role. `calm`: the most while undisturbed, 0: there was none."""

    role: str
    calm: int
    peak: int
    max_peak: int
    left: int  # in the last third of the settling phase, median
    max_left: int
    creep: int  # from the first to the last of the settling phase's second half


@dataclass(slots=True)
class HostileResult:
    """What a run has seen. `broken` are the invariants that do not hold, a line each."""

    started_at: float = 0.0  # of the undisturbed phase
    phases: list[Phase] = field(default_factory=list[Phase])
    records: list[Record] = field(default_factory=list[Record])
    reports: list[TurnReport] = field(default_factory=list[TurnReport])
    samples: list[Sample] = field(default_factory=list[Sample])
    costs: list[Cost] = field(default_factory=list[Cost])
    memories: list[Memory] = field(default_factory=list[Memory])
    lost_at: list[float] = field(default_factory=list[float])  # when a process that is a new one was seen
    broken: list[str] = field(default_factory=list[str])
    logs: str = ""


def check_latency(calm: Latency | None, hostile: Latency | None, margin_s: float) -> list[str]:
    """What is broken, a line each."""
    if calm is None or hostile is None:
        return [f"no ordinary stream had a token while {'undisturbed' if calm is None else 'attacked'}"]
    excesses = _find_excesses(calm, hostile, margin_s, "p99")
    longest = (calm.gaps.max_s, hostile.gaps.max_s, SILENCE_MARGINS * margin_s)
    return [one.line for one in excesses + _find_excess("longest gap", *longest)]


def _find_excesses(
    calm: Latency, now: Latency, margin_s: float, what: Literal["p99", "median"]
) -> list[Excess]:
    """calm's p99 bounds either of now's."""

    def pick(times: Times) -> float:
        return times.p99_s if what == "p99" else times.p50_s

    gap = _find_excess(f"{what} gap", calm.gaps.p99_s, pick(now.gaps), margin_s)
    first = (calm.first.p99_s, pick(now.first), margin_s)
    return gap + _find_excess(f"{what} time to first token", *first)


def _find_excess(name: str, calm_s: float, now_s: float, margin_s: float) -> list[Excess]:
    if now_s <= find_bound(calm_s, margin_s):
        return []
    return [Excess(name=name, calm_s=calm_s, now_s=now_s, margin_s=margin_s)]


def find_bound(before_s: float, margin_s: float) -> float:
    """What may become of a latency that was `before_s` while undisturbed."""
    return LATENCY_FACTOR * before_s + margin_s


def measure_costs(
    records: Sequence[Record], reports: Sequence[TurnReport], calm: Latency | None, margin_s: float
) -> list[Cost]:
    """Of each attack, from the turn that it had alone."""
    costs: dict[str, Cost] = {}
    for turn in sorted(reports, key=lambda one: one.began_at):
        is_alone = not any(_overlap(turn, other) for other in reports if other is not turn)
        if is_alone or turn.attack not in costs:
            phase = Phase(turn.attack, turn.began_at, turn.ended_at, is_to_blame=True)
            latency = measure(records, phase) if is_alone else None
            costs[turn.attack] = judge_cost(Cost(attack=turn.attack, latency=latency), calm, margin_s)
    return [costs[name] for name in sorted(costs)]


def judge_cost(cost: Cost, calm: Latency | None, margin_s: float) -> Cost:
    """With what is above its bound."""
    if calm is None or cost.latency is None:
        return cost
    what = "median" if cost.has_few_samples else "p99"
    excesses = _find_excesses(calm, cost.latency, margin_s, what)
    return msgspec.structs.replace(cost, excesses=excesses)


def check_costs(costs: Sequence[Cost]) -> list[str]:
    """Attacks that cost ordinary streams too much while they ran alone, a line each."""
    return [f"{cost.attack}, alone: {one.line}" for cost in costs for one in cost.excesses]


def _overlap(one: TurnReport, other: TurnReport) -> bool:
    return min(one.ended_at, other.ended_at) - max(one.began_at, other.began_at) > _MAX_LATE_S


def check_tries(records: Sequence[Record]) -> list[str]:
    """An ordinary request that had to be sent again was refused, or its connection lost."""
    again = [record for record in records if record.broken_at]
    if not again:
        return []
    num_tries = sum(len(record.broken_at) for record in again)
    return [f"{len(again)} ordinary requests were refused (503) or cut off, {num_tries} times in all"]


def sum_answers(reports: Sequence[TurnReport]) -> dict[str, Counter[str]]:
    """How each attack was answered over all of its turns."""
    answers: dict[str, Counter[str]] = {}
    for report in reports:
        answers.setdefault(report.attack, Counter()).update(report.answers)
    return answers


def check_answers(reports: Sequence[TurnReport]) -> list[str]:
    """Answers that no attack may get, and attacks that could not be played."""
    broken = [f"{one.attack} could not be played: {one.error}" for one in reports if one.error]
    for attack, answers in sum_answers(reports).items():
        allowed = ATTACKS[attack].allowed
        broken += [
            f"{attack} was answered '{answer}' {count} times, allowed: {', '.join(sorted(allowed))}"
            for answer, count in sorted(answers.items())
            if answer not in allowed and count
        ]
    return broken


def check_losses(samples: Sequence[Sample], counts: dict[str, int], logs: str) -> list[str]:
    """Processes of the site that were replaced: by what their owners say, or else by their number.

    `counts`: how many of each role there are when nothing happens.
    """
    said = [line for line in logs.splitlines() if LOST_MARK in line]
    if said:
        return [f"a process was lost: {line}" for line in said]
    pids: dict[str, set[int]] = {}
    for sample in samples:
        pids.setdefault(sample.role, set()).add(sample.pid)
    return [
        f"{len(pids[role])} {role} processes ran, not {count}"
        for role, count in counts.items()
        if role in SITE_ROLES and len(pids.get(role, ())) > count
    ]


def measure_memory(samples: Sequence[Sample], calm: Phase, end: Phase) -> list[Memory]:
    """Of every role, by its largest process; `end` is the settling phase."""
    return [_measure_role(samples, role, calm, end) for role in dict.fromkeys(one.role for one in samples)]


def _measure_role(samples: Sequence[Sample], role: str, calm: Phase, end: Phase) -> Memory:
    sizes = [(one.at, one.pid, one.rss_bytes) for one in samples if one.role == role]
    calm_bytes = max((size for at, _, size in sizes if at < calm.ends_at), default=0)
    end_s = end.ends_at - end.begins_at
    last_third = Phase("", end.ends_at - max(_LEAST_S, end_s / 3), end.ends_at)
    last_half = Phase("", end.ends_at - max(_LEAST_S, end_s / 2), end.ends_at)
    pids = {pid for _, pid, _ in sizes}
    left = [[size for at, one, size in sizes if one == pid and last_third.covers(at)] for pid in pids]
    late = [[size for at, one, size in sizes if one == pid and last_half.covers(at)] for pid in pids]
    is_own = role in MAX_GROWTH_BYTES
    return Memory(
        role=role,
        calm=calm_bytes,
        peak=max(size for _, _, size in sizes),
        max_peak=calm_bytes + MAX_GROWTH_BYTES[role] if is_own else MAX_HELPER_BYTES,
        left=max((int(statistics.median(one)) for one in left if one), default=0),
        max_left=calm_bytes + MAX_LEFT_BYTES[role] if is_own else MAX_HELPER_BYTES,
        creep=max((one[-1] - one[0] for one in late if one), default=0),
    )


def check_memory(memories: Sequence[Memory]) -> list[str]:
    """Roles over their bounds, a line each."""
    broken: list[str] = []
    for one in memories:
        role, calm = f"memory of {one.role}", f"({_mb(one.calm)} while undisturbed)"
        if one.peak > one.max_peak:
            broken.append(f"{role} reached {_mb(one.peak)} MB, at most {_mb(one.max_peak)} MB {calm}")
        if one.left > one.max_left:
            left = f"stays at {_mb(one.left)} MB after the attacks"
            broken.append(f"{role} {left}, at most {_mb(one.max_left)} MB {calm}")
        if one.creep > MAX_CREEP_BYTES:
            creep = f"{_mb(one.creep)} MB in the settling phase's second half"
            broken.append(f"{role} grows after the attacks: {creep}, at most {_mb(MAX_CREEP_BYTES)} MB")
    return broken


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / _MB:.0f}"
