"""CoreLosses: decides after the loss of an engine core whether its owner starts another.

If the file of a lost core (core/faults/death_journal.py) names a suspect request that ran alone, the loss is
the suspect's, which fails after two; all others count against a RestartBudget.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .restarts import LOSS_WINDOW_S, RestartBudget

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


class CoreLosses(RestartBudget):
    """Counts the lost cores of one owner. `journal_path` is the file in which a core names its suspect."""

    def __init__(self, journal_path: str, max_losses: int, window_s: float = LOSS_WINDOW_S) -> None:
        super().__init__(max_losses, window_s)
        self._journal_path = Path(journal_path)
        self._explained = DeathRecord()  # what the file said at the last loss that was not counted

    def note_loss(self, now: float) -> float | None:
        record = read_death_record(self._journal_path)
        if record.alone is not None and record != self._explained:  # else it is the file of an earlier core
            self._explained = record
            return 0.0
        return super().note_loss(now)
