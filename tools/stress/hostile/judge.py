"""What a hostile run must show: ordinary streams as before, bounded memory, no process lost. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from ..kills import SITE_ROLES
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


class Phase(msgspec.Struct, frozen=True):
    """A part of the run, by time.monotonic. is_to_blame: for waits that begin in it, else that end in it."""

    name: str
    begins_at: float
    ends_at: float
    is_to_blame: bool = False

    def covers(self, at: float) -> bool:
        """Whether `at` is within it."""
        return self.begins_at <= at < self.ends_at

    def has(self, since: float, until: float) -> bool:
        """Whether a wait is counted here."""
        return self.covers(since if self.is_to_blame else until)


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between pieces of an answer, and from a request to its first piece."""

    num_requests: int
    num_gaps: int
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_max_s: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What ordinary streams felt while an attack ran alone. latency: None when it had no time alone."""

    attack: str
    latency: Latency | None

    @property
    def has_few_samples(self) -> bool:
        """So that a p99 would be a single wait: the median is judged."""
        one = self.latency
        return one is None or one.num_gaps < _LEAST_GAPS or one.num_requests < _LEAST_FIRST_TOKENS


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


def measure(records: Sequence[Record], phase: Phase) -> Latency | None:
    """Of the phase's waits; None if there are none."""
    gaps = sorted(
        after - before
        for record in records
        for before, after in pairwise(record.piece_times)
        if phase.has(before, after)
    )
    first = sorted(
        record.piece_times[0] - record.began_at
        for record in records
        if record.piece_times and phase.has(record.began_at, record.piece_times[0])
    )
    if not gaps or not first:
        return None
    return Latency(
        num_requests=len(first),
        num_gaps=len(gaps),
        gap_p50_s=gaps[len(gaps) // 2],
        gap_p99_s=gaps[int(0.99 * (len(gaps) - 1))],
        gap_max_s=gaps[-1],
        ttft_p50_s=first[len(first) // 2],
        ttft_p99_s=first[int(0.99 * (len(first) - 1))],
        ttft_max_s=first[-1],
    )


def check_latency(calm: Latency | None, hostile: Latency | None, margin_s: float) -> list[str]:
    """What is broken, a line each."""
    if calm is None or hostile is None:
        return [f"no ordinary stream had a token while {'undisturbed' if calm is None else 'attacked'}"]
    bounds = (
        ("p99 gap", calm.gap_p99_s, hostile.gap_p99_s, margin_s),
        ("p99 time to first token", calm.ttft_p99_s, hostile.ttft_p99_s, margin_s),
        ("longest gap", calm.gap_max_s, hostile.gap_max_s, SILENCE_MARGINS * margin_s),
    )
    return [line for bound in bounds for line in _check_bound(*bound)]


def find_bound(before_s: float, margin_s: float) -> float:
    """What may become of a latency that was `before_s` while undisturbed."""
    return LATENCY_FACTOR * before_s + margin_s


def measure_costs(records: Sequence[Record], reports: Sequence[TurnReport]) -> list[Cost]:
    """Of each attack, from the turn that it had alone."""
    costs: dict[str, Cost] = {}
    for turn in sorted(reports, key=lambda one: one.began_at):
        is_alone = not any(_overlap(turn, other) for other in reports if other is not turn)
        if is_alone or turn.attack not in costs:
            phase = Phase(turn.attack, turn.began_at, turn.ended_at, is_to_blame=True)
            latency = measure(records, phase) if is_alone else None
            costs[turn.attack] = Cost(attack=turn.attack, latency=latency)
    return [costs[name] for name in sorted(costs)]


def check_costs(costs: Sequence[Cost], calm: Latency | None, margin_s: float) -> list[str]:
    """Attacks that cost ordinary streams too much while they ran alone, a line each."""
    broken: list[str] = []
    for cost in costs:
        one = cost.latency
        if calm is None or one is None:
            continue
        few = cost.has_few_samples
        gap_s, ttft_s = (one.gap_p50_s, one.ttft_p50_s) if few else (one.gap_p99_s, one.ttft_p99_s)
        what = "median" if few else "p99"
        lines = _check_bound(f"{what} gap", calm.gap_p99_s, gap_s, margin_s)
        lines += _check_bound(f"{what} time to first token", calm.ttft_p99_s, ttft_s, margin_s)
        broken += [f"{cost.attack}, alone: {line}" for line in lines]
    return broken


def _check_bound(name: str, before_s: float, now_s: float, more_s: float) -> list[str]:
    most_s = find_bound(before_s, more_s)
    if now_s <= most_s:
        return []
    sum_ms = f"{LATENCY_FACTOR:g} x {1e3 * before_s:.0f} + {1e3 * more_s:.0f}"
    return [f"ordinary streams' {name} is {1e3 * now_s:.0f} ms, at most {sum_ms} = {1e3 * most_s:.0f} ms"]


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
        if one.peak > one.max_peak:
            broken.append(
                f"memory of {one.role} reached {_mb(one.peak)} MB, at most {_mb(one.max_peak)} MB"
                f" ({_mb(one.calm)} while undisturbed)"
            )
        if one.left > one.max_left:
            broken.append(
                f"memory of {one.role} stays at {_mb(one.left)} MB after the attacks, "
                f"at most {_mb(one.max_left)} MB ({_mb(one.calm)} while undisturbed)"
            )
        if one.creep > MAX_CREEP_BYTES:
            broken.append(
                f"memory of {one.role} grows after the attacks: {_mb(one.creep)} MB in the settling phase's "
                f"second half, at most {_mb(MAX_CREEP_BYTES)} MB"
            )
    return broken


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / _MB:.0f}"
