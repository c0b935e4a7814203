"""RestartBudget: how often and how soon a lost process is started again."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..decoding import decode_json

MAX_LOSSES = 5  # within LOSS_WINDOW_S; one more is too many
MAX_WORKER_LOSSES = 3
LOSS_WINDOW_S = 60.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0  # before the second restart within the window, then doubled
MAX_RECORD_BYTES = 1 << 20


class DeathRecord(msgspec.Struct):
    """`alone`: the suspect that runs alone. `num_deaths`: request -> how many cores died while it did."""

    alone: str | None = None
    num_deaths: dict[str, int] = {}


def read_death_record(path: Path) -> DeathRecord:
    """The last core's record; an empty one if none can be read."""
    try:
        with path.open("rb") as file:
            return decode_json(file.read(MAX_RECORD_BYTES), DeathRecord)
    except (OSError, msgspec.MsgspecError):
        return DeathRecord()


class RestartBudget:
    """Counts the losses of one kind of process.

    A core's loss while a suspect ran alone (core/faults/death_journal.py) does not count: the suspect ends
    after two of them.
    """

    def __init__(
        self, max_losses: int = MAX_LOSSES, window_s: float = LOSS_WINDOW_S, journal_path: str | None = None
    ) -> None:
        """More than `max_losses` within `window_s` are too many. `journal_path`: where suspects are named."""
        self._max_losses = max_losses
        self._window_s = window_s
        self._journal_path = journal_path
        self._losses: list[float] = []
        self._explained = DeathRecord()  # at the last loss that was not counted

    def note_loss(self, now: float) -> float | None:
        """Seconds to wait before the next start; None after too many losses within the window."""
        if self._journal_path is not None:
            record = read_death_record(Path(self._journal_path))
            if record.alone is not None and record != self._explained:  # else an earlier core has written it
                self._explained = record
                return 0.0
        self._losses = [at for at in self._losses if now - at < self._window_s] + [now]
        num_before = len(self._losses) - 1
        if num_before >= self._max_losses:
            return None
        return 0.0 if num_before == 0 else min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_before - 1, 32))

    def is_spent_by_next(self, now: float) -> bool:
        """Whether after the next loss no other is allowed within the window. False where none ever is."""
        num_before = sum(now - at < self._window_s for at in self._losses)
        return 0 < self._max_losses <= num_before + 1

    def forgive(self) -> None:
        """Forget the losses so far: their cause is gone."""
        self._losses = []

    @property
    def excess(self) -> str:
        """The number of losses that is too many, in words: '6 times in 60 s'."""
        count = f"{self._max_losses + 1} times" if self._max_losses else "once"
        return f"{count} in {self._window_s:g} s"
