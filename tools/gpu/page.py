"""The rows that tools/gpu_check left in a file, as a part of docs/performance.md."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from ..markdown import format_table, replace_part
from .rows import Row, append_line

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
PART = "gpu"
_RUN = "run"  # the part of the rows that say which run it was
_PLACES = ("device", "versions")  # of the environment's rows
# What says how fast it is; the rest says whether it is right, and is counted.
_FIGURES = ("profile", "attention sweep", "kernels", "flashinfer", "small engine", "large engine", "contest")
_MARKS = {True: "ok", False: "no", None: ""}


def append_run(path: Path, command: str) -> None:
    """Begin a run's rows: when it was, of which commit, by which command."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    for row in (Row("date", date), Row("commit", _find_commit()), Row("command", command)):
        append_line(path, _RUN, row)


def write_page(path: Path, page: Path = PAGE) -> int:
    """Replace the page's part by these rows; 1, with a line that says why, if there are no figures."""
    rows = list(_read(path)) if path.is_file() else []
    if not any(part in _FIGURES for part, _ in rows):
        print(
            f"tools/gpu_check: --page {path}: a file of --out with rows of {', '.join(_FIGURES)}",
            file=sys.stderr,
        )
        return 1
    text = replace_part(page.read_text(encoding="utf-8"), PART, render(rows))
    page.write_text(text, encoding="utf-8")
    return 0


def render(rows: list[tuple[str, Row]]) -> str:
    """A table for each part with figures, a line about the others, and where all of it was measured."""
    text: list[str] = []
    for part in _FIGURES:
        own = [row for name, row in rows if name == part]
        if own:
            cells = [[row.name, row.value, row.wanted, _MARKS[row.is_ok]] for row in own]
            text += [format_table([part, "found", "wanted", ""], cells)]
    judged = [(part, row) for part, row in rows if part not in _FIGURES and row.is_ok is not None]
    failed = [f"{part}: {row.name} ({row.value})" for part, row in judged if not row.is_ok]
    others = "".join(f" Not: {each}." for each in failed)
    text.append(f"Of {len(judged)} checks, {len(judged) - len(failed)} passed.{others}\n")
    facts = {row.name: row.value for part, row in rows if part == _RUN or row.name in _PLACES}
    where = "; ".join(f"{name} {facts[name]}" for name in ("date", *_PLACES, "commit") if name in facts)
    text.append(f"Measured by `{facts.get('command', 'tools/gpu_check')}`: {where}.\n")
    return "\n".join(text)


def _read(path: Path) -> Iterable[tuple[str, Row]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            fields = json.loads(line)
            yield fields.pop("part"), Row(**fields)
        except (ValueError, TypeError, KeyError):
            continue  # it was cut off


def _find_commit() -> str:
    command = ["git", "describe", "--always", "--dirty=+changes", "--abbrev=7"]
    try:
        done = subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, timeout=10)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
