"""What a part of the check says: rows, written one by one, so that one that is cut off keeps what it had."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `is_ok` is None where there is nothing to pass or fail."""

    name: str
    value: str
    wanted: str = ""
    is_ok: bool | None = None


# Called with each finding as it comes.
Say = Callable[[Row], None]


def judge(name: str, fraction: float, least: float, detail: str) -> Row:
    """A fraction of what the device allows, against the least that is wanted."""
    return Row(name, f"{fraction:.0%} ({detail})", f"at least {least:.0%}", fraction >= least)


def append_line(path: Path, part: str, row: Row) -> None:
    """Add a part's row to a file of several parts."""
    with path.open("a") as file:
        file.write(json.dumps({"part": part, **asdict(row)}) + "\n")


class RowFile:
    """Rows as lines of JSON in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: Row) -> None:
        """Add a row at the end."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def read(self) -> list[Row]:
        """All rows so far; a line that was cut off is left out."""
        rows: list[Row] = []
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            try:
                rows.append(Row(**json.loads(line)))
            except (ValueError, TypeError):
                continue
        return rows


class RowTeller:
    """While a part runs: says its rows on stderr as they come, and adds them to a file.

    For `with`; what came last is told at its end. A run that is cut off leaves the file.
    """

    _INTERVAL_S = 1.0

    def __init__(self, rows: RowFile, part: str, out: Path | None) -> None:
        self._rows, self._part, self._out = rows, part, out
        self._num_told = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._INTERVAL_S):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        rows = self._rows.read()
        for row in rows[self._num_told :]:
            print(f"  {row.name}: {row.value}", file=sys.stderr, flush=True)
            if self._out is not None:
                append_line(self._out, self._part, row)
        self._num_told = len(rows)
