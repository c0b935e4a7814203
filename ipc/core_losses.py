"""CoreLosses: how the owner of an engine core counts lost cores, until there are too many for another start.

A death is not counted if a request explains it. A request that was in the engine when two cores in a row died
is suspected, and the next core runs it alone, after noting that in a file (core/death_journal.py). If this
core dies too, the request did it and not the engine. After two such deaths it ends with an error, so deaths
that are not counted come to an end.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .restarts import RestartBudget

MAX_RECORD_BYTES = 1 << 20


class DeathRecord(msgspec.Struct):
    """`alone`: the suspect that runs, and nothing else. `num_deaths`: request -> cores that died under it."""

    alone: str | None = None
    num_deaths: dict[str, int] = {}


def read_death_record(path: Path) -> DeathRecord:
    """What the last core left; an empty record where nothing can be read."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=DeathRecord)
    except (OSError, msgspec.MsgspecError):
        return DeathRecord()


class CoreLosses:
    """The losses of one core after the other."""

    def __init__(self, budget: RestartBudget, journal_path: str) -> None:
        self._budget = budget
        self._journal_path = Path(journal_path)
        self._explained = DeathRecord()  # what the last death that was not counted had left

    def note_loss(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when there were too many losses lately."""
        record = read_death_record(self._journal_path)
        if record.alone is not None and record != self._explained:  # else it died before it got so far
            self._explained = record
            return 0.0
        return self._budget.note_loss(now)

    @property
    def excess(self) -> str:
        """What is too many, for a person."""
        return self._budget.excess
