"""What a hostile run prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...bench.machine import write_json
from ...bench.table import format_table
from ..checks import count_failed
from ..report import format_broken
from .judge import MAX_HELPER_BYTES, HostileResult, Latency, Memory, Phase, find_bound, measure, sum_answers
from .plan import TurnReport


def format_hostile(result: HostileResult, margin_s: float) -> str:
    """Tables of ordinary streams, what each attack costs them, answers and memory, then what is broken."""
    parts = [_format_latencies(result), _format_costs(result, margin_s), _format_attacks(result)]
    parts.append(_format_memory(result.memories))
    return "\n\n".join([*parts, format_broken(result.broken)])


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
        rows.append([phase.name, f"{phase.ends_at - phase.begins_at:.0f}", *_list_latency(one)])
    times = ["gap p50 ms", "p99", "max", "first token p50 ms", "p99", "max"]
    return format_table(["ordinary streams", "s", "requests", *times], rows)


def _list_latency(one: Latency | None) -> list[str]:
    if one is None:
        return ["0", *["-"] * 6]
    gaps = (one.gap_p50_s, one.gap_p99_s, one.gap_max_s)
    first = (one.ttft_p50_s, one.ttft_p99_s, one.ttft_max_s)
    return [str(one.num_requests), *_list_ms(*gaps, *first)]


def _format_costs(result: HostileResult, margin_s: float) -> str:
    """What ordinary streams felt while each attack ran alone, beside what they may."""
    calm = measure(result.records, result.phases[0])
    rows: list[list[str]] = []
    for cost in result.costs:
        one = cost.latency
        if one is None or calm is None:
            rows.append([cost.attack, *["-"] * 8, "no sample alone"])
            continue
        most_s = [find_bound(before_s, margin_s) for before_s in (calm.gap_p99_s, calm.ttft_p99_s)]
        gaps = [str(one.num_gaps), *_list_ms(one.gap_p50_s, one.gap_p99_s, most_s[0])]
        first = [str(one.num_requests), *_list_ms(one.ttft_p50_s, one.ttft_p99_s, most_s[1])]
        is_broken = any(line.startswith(f"{cost.attack}, alone:") for line in result.broken)
        few = "too few samples, by the median: " if cost.has_few_samples else ""
        rows.append([cost.attack, *gaps, *first, few + ("BROKEN" if is_broken else "holds")])
    times = ["gaps", "p50 ms", "p99", "at most", "first tokens", "p50 ms", "p99", "at most", "bound"]
    return format_table(["while it ran alone", *times], rows)


def _list_ms(*times_s: float) -> list[str]:
    return [f"{1e3 * time_s:.0f}" for time_s in times_s]


def _format_attacks(result: HostileResult) -> str:
    """Beside each attack the worst that an ordinary stream felt in a turn of it, and what was lost then."""
    rows: list[list[str]] = []
    for attack, answers in sorted(sum_answers(result.reports).items()):
        turns = [one for one in result.reports if one.attack == attack]
        felt = [_measure_turn(result, one) for one in turns]
        known = [one for one in felt if one is not None]
        lost = sum(one.began_at <= at < one.ended_at for one in turns for at in result.lost_at)
        rows.append(
            [
                attack,
                str(len(turns)),
                f"{1e3 * max(one.gap_p99_s for one in known):.0f}" if known else "-",
                f"{1e3 * max(one.gap_max_s for one in known):.0f}" if known else "-",
                f"{1e3 * max(one.ttft_max_s for one in known):.0f}" if known else "-",
                str(lost),
                "  ".join(f"{answer}: {count}" for answer, count in sorted(answers.items())) or "none",
            ]
        )
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
