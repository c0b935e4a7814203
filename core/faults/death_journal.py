"""DeathJournal: which request was alone in the engine when a core died. It outlives the cores.

Suspects are run alone (blame.py), and the journal is written before such a step, so that the next core knows
whose fault the death was. If it cannot be written, the engine's restart limits are what is left.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from ...ipc.processes.restarts import DeathRecord, read_death_record

_log = logging.getLogger(__name__)


class DeathJournal:
    """`num_deaths`: request id -> earlier cores that died while nothing else ran."""

    def __init__(self, path: str) -> None:
        """Read what the last core left at `path`; '' keeps nothing."""
        self._path = Path(path) if path else None
        record = DeathRecord() if self._path is None else read_death_record(self._path)
        self.num_deaths = record.num_deaths
        if record.alone is not None:
            self.num_deaths[record.alone] = self.num_deaths.get(record.alone, 0) + 1
        self._alone: str | None = None
        if record.alone is not None:
            self._write()

    def note_alone(self, request_id: str | None) -> None:
        """The next step holds this request alone; None: it is not of one request. Writes only what is new."""
        if request_id == self._alone:
            return
        if self._alone is not None:
            self.num_deaths.pop(self._alone, None)  # it has got a token, or has ended
        self._alone = request_id
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        new = self._path.with_name(f".{self._path.name}")
        try:
            new.write_bytes(msgspec.json.encode(DeathRecord(self._alone, self.num_deaths)))
            os.replace(new, self._path)
        except OSError as error:
            _log.warning("%s not written: %s", self._path.name, error)
