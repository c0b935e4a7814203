"""What a part of the check says: rows, told one by one, so that one that is cut off keeps what it had."""

from __future__ import annotations

import json
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

    def to_line(self) -> str:
        """As a part writes it, and `read_row` reads it."""
        return json.dumps(asdict(self)) + "\n"


# Called with each finding as it comes.
Say = Callable[[Row], None]


def judge(name: str, fraction: float, least: float, detail: str) -> Row:
    """A fraction of what the device allows, against the least that is wanted."""
    return Row(name, f"{fraction:.0%} ({detail})", f"at least {least:.0%}", fraction >= least)


def count_equal(name: str, ours: list[list[int]], wanted: list[list[int]], *, is_judged: bool = True) -> Row:
    """How many runs have the same tokens; all of them should."""
    num_equal = sum(a == b for a, b in zip(ours, wanted, strict=True))
    is_ok = num_equal == len(wanted) if is_judged else None
    return Row(name, f"{num_equal} of {len(wanted)} runs equal", "all" if is_judged else "", is_ok)


def read_row(line: str) -> Row | None:
    """None for a line that was cut off."""
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError):
        return None


def append_line(path: Path, part: str, row: Row) -> None:
    """Add a part's row to a file of several parts."""
    with path.open("a") as file:
        file.write(json.dumps({"part": part, **asdict(row)}) + "\n")
