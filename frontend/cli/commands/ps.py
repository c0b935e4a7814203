"""`quire ps`: the daemons that run, with their processes, clients and load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ....ipc.daemon.daemon_state import read_failures
from ....ipc.daemon.run_dir import find_daemon
from ....ipc.errors import make_printable
from ...daemon import DaemonInfo, EngineInfo, inspect_daemons
from ..parser import ExitCode, Parser

_EPILOG = """\
--json prints a list of objects with the keys name, model, state, uptime_s, restarts, clients, num_running,
num_waiting, kv_blocks_used, kv_blocks_total, tokens_per_s, processes: [{role, rank, pid, engine}] and
engines: [{index, state, restarts, last_loss, and the counts}]; counts are null while no engine answers.
Engines of a daemon that has several are listed below it, as NAME/ENGINE. RESTARTS are of engine cores: a
worker that was lost and replaced is not counted, `quire daemon logs NAME` tells of it.
"""
_COLUMNS = (
    *("NAME", "MODEL", "STATE", "UPTIME", "RESTARTS"),
    *("CLIENTS", "RUNNING", "WAITING", "KV", "TOK/S", "PIDS"),
)


def run(argv: Sequence[str]) -> int:
    """Run `quire ps`."""
    parser = Parser("quire ps", "List the daemons of this user that run.", _EPILOG, " [NAME ...]")
    parser.add_argument("name", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse(argv)
    for name in options.name:
        find_daemon(name)  # says which there are
    daemons = [daemon for daemon in inspect_daemons() if not options.name or daemon.name in options.name]
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(daemons)).decode())
        return ExitCode.OK
    lines = _list_losses(daemons, are_all=not options.name)
    if daemons:
        rows = [_COLUMNS, *(row for daemon in daemons for row in _format_rows(daemon))]
        lines.insert(0, _format_table(rows))
    text = "\n".join(lines) or "no daemon runs; `quire daemon start` starts one"
    print("\n".join(map(make_printable, text.split("\n"))))
    return ExitCode.OK


def _list_losses(daemons: Sequence[DaemonInfo], *, are_all: bool) -> list[str]:
    """Why engines are not started again, and why daemons have ended by themselves."""
    lines = [
        f"{daemon.name}/{engine.index} is lost: {engine.last_loss}"
        for daemon in daemons
        for engine in daemon.engines
        if engine.state == "lost"
    ]
    running = {daemon.name for daemon in daemons}
    failures = [failure for failure in read_failures() if are_all and failure.name not in running]
    return [*lines, *(f"{failure.name} has failed: {failure.reason}" for failure in failures)]


def _format_rows(daemon: DaemonInfo) -> list[tuple[str, ...]]:
    """A daemon's row, and one for each of several engines."""
    pids = [process.pid for process in daemon.processes]
    duration = _format_duration(daemon.uptime_s)
    rows = [_format_row(daemon, (daemon.name, daemon.model, daemon.state, duration), pids)]
    for engine in daemon.engines if len(daemon.engines) > 1 else ():
        pids = [process.pid for process in daemon.processes if process.engine == engine.index]
        rows.append(_format_row(engine, (f"{daemon.name}/{engine.index}", "", engine.state, ""), pids))
    return rows


def _format_row(info: DaemonInfo | EngineInfo, names: tuple[str, ...], pids: list[int]) -> tuple[str, ...]:
    used, total = info.kv_blocks_used, info.kv_blocks_total
    counts = (info.clients, info.num_running, info.num_waiting)
    return (
        *names,
        str(info.restarts),
        *("-" if count is None else str(count) for count in counts),
        "-" if used is None or not total else f"{100 * used / total:.0f}%",
        "-" if info.tokens_per_s is None else f"{info.tokens_per_s:.0f}",
        " ".join(map(str, pids)),
    )


def _format_duration(seconds: float) -> str:
    """'42s', '7m12s', '3h05m', '2d4h'."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
