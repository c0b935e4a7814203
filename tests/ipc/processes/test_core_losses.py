"""Which deaths of a core count: not those that a suspect explains, each of which is believed once."""

from __future__ import annotations

from pathlib import Path

import msgspec
from quire.ipc.processes.restarts import CoreLosses, DeathRecord, read_death_record


def leave(path: Path, alone: str | None, **num_deaths: int) -> None:
    path.write_bytes(msgspec.json.encode(DeathRecord(alone, num_deaths)))


def test_a_death_while_a_suspect_ran_alone_is_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "deaths.json"
    losses = CoreLosses(str(path), max_losses=1)
    assert losses.note_loss(1.0) == 0.0
    for num_deaths in range(5):
        leave(path, "r", r=num_deaths)
        assert losses.note_loss(2.0) == 0.0
    leave(path, None, r=5)
    assert losses.note_loss(3.0) is None
    assert losses.excess == "2 times in 60 s"


def test_a_core_that_dies_before_anything_runs_is_counted_whatever_the_last_one_left(tmp_path: Path) -> None:
    path = tmp_path / "deaths.json"
    losses = CoreLosses(str(path), max_losses=1)
    leave(path, "r")
    assert [losses.note_loss(1.0) for _ in range(3)] == [0.0, 0.0, None]


def test_what_cannot_be_read_explains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deaths.json"
    path.write_text('{"alone": 7}')
    assert read_death_record(path) == DeathRecord()
    assert CoreLosses(str(path), max_losses=0).note_loss(1.0) is None
