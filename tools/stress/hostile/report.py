"""What a hostile run prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...bench.machine import write_json
from ...bench.table import format_table
from ..checks import count_failed
from ..measures import Latency, Phase, measure
from ..report import format_report
from .judge import MAX_HELPER_BYTES, HostileResult, Memory, find_bound, sum_answers
from .plan import TurnReport


def format_hostile(result: HostileResult, margin_s: float) -> str:
    """Tables of ordinary streams, what each attack costs them, answers and memory, then what is broken."""
    tables = [_format_latencies(result), _format_costs(result, margin_s), _format_attacks(result)]
    return format_report([*tables, _format_memory(result.memories)], result.broken)


def write_hostile(result: HostileResult, facts: dict[str, str], path: str | None) -> None:
    """Everything as JSON; the logs only where something broke, to look for the cause."""
    content: dict[str, Any] = {
        "machine": facts,
        "num_requests": len(result.records),
        "num_failed": count_failed(result.records),
        "ordinary": {phase.name: measure(result.records, phase) for phase in result.phases},
        "costs": result.costs,
        "attacks": [
            {
                "attack": one.attack,
                "began_s": one.began_at - result.started_at,
                "ended_s": one.ended_at - result.started_at,
                "answers": one.answers,
                "error": one.error,
                "ordinary": _measure_turn(result, one),
            }
            for one in result.reports
        ],
        "memory": result.memories,
        "broken": result.broken,
        "logs": result.logs.splitlines() if result.broken else [],
    }
    write_json(path, content)


def _format_latencies(result: HostileResult) -> str:
    rows: list[list[str]] = []
    for phase in result.phases:
        one = measure(result.records, phase)
        cells = ["0", *["-"] * 6] if one is None else [str(one.first.num)]
        cells += [] if one is None else one.gaps.list_ms() + one.first.list_ms()
        rows.append([phase.name, f"{phase.ends_at - phase.begins_at:.0f}", *cells])
    times = ["gap p50 ms", "p99", "max", "first token p50 ms", "p99", "max"]
    return format_table(["ordinary streams", "s", "requests", *times], rows)


def _format_costs(result: HostileResult, margin_s: float) -> str:
    """What ordinary streams felt while each attack ran alone, beside what they may."""
    phase = result.phases[0]
    calm = measure(result.records, phase)
    rows: list[list[str]] = []
    for cost in result.costs:
        if cost.latency is None or calm is None:
            rows.append([cost.attack, *["-"] * 8, "no sample alone"])
            continue
        cells = [cost.attack]
        for now, before in ((cost.latency.gaps, calm.gaps), (cost.latency.first, calm.first)):
            most_s = find_bound(before.p99_s, margin_s)
            cells += [str(now.num), *now.list_ms()[:2], f"{1e3 * most_s:.0f}"]
        over = ", ".join(one.brief for one in cost.excesses)
        few = "too few samples, by the median: " if cost.has_few_samples else ""
        rows.append([*cells, few + (f"BROKEN, {over}" if over else "holds")])
    times = ["gaps", "p50 ms", "p99", "at most", "first tokens", "p50 ms", "p99", "at most", "bound"]
    span_s = phase.ends_at - phase.begins_at
    note = f"(undisturbed, of which bounds are made, was measured once: {span_s:.0f} s before the attacks)"
    return format_table(["while it ran alone", *times], rows) + "\n" + note


def _format_attacks(result: HostileResult) -> str:
    """Beside each attack the worst that an ordinary stream felt in a turn of it, and what was lost then."""
    rows: list[list[str]] = []
    for attack, answers in sorted(sum_answers(result.reports).items()):
        turns = [one for one in result.reports if one.attack == attack]
        felt = [_measure_turn(result, one) for one in turns]
        known = [one for one in felt if one is not None]
        lost = sum(one.began_at <= at < one.ended_at for one in turns for at in result.lost_at)
        worst_s = [
            max((pick(one) for one in known), default=None)
            for pick in (lambda it: it.gaps.p99_s, lambda it: it.gaps.max_s, lambda it: it.first.max_s)
        ]
        times = ["-" if time_s is None else f"{1e3 * time_s:.0f}" for time_s in worst_s]
        said = "  ".join(f"{answer}: {count}" for answer, count in sorted(answers.items())) or "none"
        rows.append([attack, str(len(turns)), *times, str(lost), said])
    header = ["attack", "turns", "worst gap p99 ms", "max", "first token max", "lost", "answers"]
    return format_table(header, rows)


def _measure_turn(result: HostileResult, turn: TurnReport) -> Latency | None:
    return measure(result.records, Phase(turn.attack, turn.began_at, turn.ended_at, is_to_blame=True))


def _format_memory(memories: Sequence[Memory]) -> str:
    rows: list[list[str]] = []
    for one in memories:
        sizes = (one.calm, one.peak, one.max_peak, one.left, one.max_left)
        rows.append([one.role, *(f"{size / 1e6:.0f}" for size in sizes)])
    header = ["memory, MB", "undisturbed", "peak", "at most", "at the end", "at most"]
    note = f"(a role that is not Quire's own kind of process may have {MAX_HELPER_BYTES / 1e6:.0f} MB)"
    return format_table(header, rows) + "\n" + note
