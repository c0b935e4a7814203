"""What a stress run prints and writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, get_args

from ..bench.machine import write_json
from ..bench.table import format_table
from .asks import ClientKind
from .checks import count_failed
from .measures import Recovery, find_recoveries, measure
from .record import Record
from .run import StressResult
from .samples import Slope, find_slopes

BROKEN_EXIT_CODE = 1  # of a run in which an invariant does not hold
_MAX_BROKEN_LINES = 20


def format_run(result: StressResult) -> str:
    """Tables of requests, kills and growth, then what is broken."""
    tables = [_format_requests(result), _format_kills(result), _format_slopes(result)]
    return format_report(tables, result.broken)


def format_report(tables: Sequence[str], broken: Sequence[str]) -> str:
    """Of any run: the tables that are not empty, and the verdict."""
    return "\n\n".join([*filter(None, tables), format_broken(broken)])


def format_broken(broken: Sequence[str]) -> str:
    """The verdict."""
    if not broken:
        return "every invariant holds"
    hidden = len(broken) - _MAX_BROKEN_LINES
    rows = [f"  {line}" for line in broken[:_MAX_BROKEN_LINES]] + (
        [f"  and {hidden} more"] if hidden > 0 else []
    )
    return "\n".join([f"BROKEN: {len(broken)}", *rows])


def write_run(result: StressResult, facts: dict[str, str], path: str | None) -> None:
    """Everything as JSON; tokens and the daemon's log only where something broke, to look for the cause."""
    content: dict[str, Any] = {
        "machine": facts,
        "duration_s": result.duration_s,
        "num_requests": len(result.records),
        "num_failed": count_failed(result.records),
        "noise": result.noise,
        "latency": measure(result.records),
        "kills": find_recoveries(result.records, result.strikes, result.started_at),
        "growth_per_request": _find_slopes(result),
        "broken": result.broken,
        "daemon_log": result.daemon_log.splitlines(),
        "requests": [
            {
                "number": record.number,
                "ask": record.ask,
                "client": record.client,
                "behaviour": record.behaviour,
                "end": record.end,
                "error": record.error,
                "began_s": record.began_at - result.started_at,
                "ended_s": record.ended_at - result.started_at,
                "num_tokens": record.num_tokens,
                "num_broken_connections": len(record.broken_at),
            }
            | (_describe_pieces(record, result.started_at) if result.broken else {})
            for record in result.records
        ],
    }
    write_json(path, content)


def summarize(recoveries: Sequence[Recovery]) -> tuple[str, str]:
    """Median and longest seconds, '-' where no kill was felt."""
    felt = [one.recovery_s for one in recoveries if one.recovery_s is not None]
    return (f"{statistics.median(felt):.2f}", f"{max(felt):.2f}") if felt else ("-", "-")


def _format_requests(result: StressResult) -> str:
    rows: list[list[str]] = []
    for kind in get_args(ClientKind):
        records = [record for record in result.records if record.client == kind]
        if not records:
            continue
        latency = measure(records)
        counts = (
            len(records),
            count_failed(records),
            sum(record.end == "left" for record in records),
            sum(len(record.broken_at) for record in records),
        )
        times = ["-"] * 3 if latency is None else latency.gaps.list_ms()
        rows.append([kind, *map(str, counts), *times])
    header = ["client", "requests", "failed", "left early", "tried again", "gap p50 ms", "p99", "max"]
    return format_table(header, rows)


def _format_kills(result: StressResult) -> str:
    groups: dict[tuple[str, str], list[Recovery]] = {}
    for one in find_recoveries(result.records, result.strikes, result.started_at):
        groups.setdefault((one.role, one.method), []).append(one)
    rows = [
        [f"{role} {method}", str(len(group)), *summarize(group)]
        for (role, method), group in sorted(groups.items())
    ]
    return format_table(["killed", "times", "recovery s, median", "max"], rows) if rows else ""


def _format_slopes(result: StressResult) -> str:
    rows = [
        [
            one.role,
            f"{one.lived_s:.0f}",
            str(one.num_requests),
            f"{one.rss_bytes / 1e3:+.2f}",
            f"{one.fds:+.4f}",
        ]
        for one in _find_slopes(result)
    ]
    header = ["process", "lived s", "requests", "each left: RSS kB", "descriptors"]
    return format_table(header, rows) if rows else ""


def _find_slopes(result: StressResult) -> list[Slope]:
    return find_slopes(result.samples, [record.ended_at for record in result.records])


def _describe_pieces(record: Record, started_at: float) -> dict[str, Any]:
    return {"token_ids": record.token_ids, "pieces_s": [at - started_at for at in record.piece_times]}
