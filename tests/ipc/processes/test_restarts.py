"""The restart budget: at once, then later and later, then not any more; a death that is explained is free."""

from __future__ import annotations

from pathlib import Path

import msgspec
from quire.ipc.processes.restarts import (
    LOSS_WINDOW_S,
    MAX_BACKOFF_S,
    MAX_LOSSES,
    DeathRecord,
    RestartBudget,
    read_death_record,
)


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer_and_longer() -> None:
    budget = RestartBudget()
    waits = [budget.note_loss(float(i)) for i in range(MAX_LOSSES)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert budget.note_loss(float(MAX_LOSSES)) is None
    many = RestartBudget(max_losses=200)
    assert [many.note_loss(0.0) for _ in range(200)][-1] == MAX_BACKOFF_S


def test_losses_are_forgotten_after_the_window_or_when_they_are_forgiven() -> None:
    budget = RestartBudget()
    for i in range(10 * MAX_LOSSES):
        assert budget.note_loss(i * LOSS_WINDOW_S / MAX_LOSSES) is not None
    assert budget.note_loss(1e6) == 0.0
    budget.forgive()
    assert [budget.note_loss(1e6) for _ in range(MAX_LOSSES + 1)].count(None) == 1


def test_limits_are_counted_and_named_as_they_are_set() -> None:
    budget = RestartBudget(max_losses=200, window_s=0.5)
    assert [budget.note_loss(100.0) for _ in range(201)].count(None) == 1
    assert budget.excess == "201 times in 0.5 s"
    assert budget.note_loss(100.5) == 0.0
    assert RestartBudget(max_losses=0).note_loss(1.0) is None


def leave(path: Path, alone: str | None, **num_deaths: int) -> None:
    path.write_bytes(msgspec.json.encode(DeathRecord(alone, num_deaths)))


def test_a_death_while_a_suspect_ran_alone_counts_if_it_is_an_earlier_cores(tmp_path: Path) -> None:
    path = tmp_path / "deaths.json"
    budget = RestartBudget(max_losses=1, journal_path=str(path))
    assert budget.note_loss(1.0) == 0.0
    for num_deaths in range(5):
        leave(path, "r", r=num_deaths)
        assert budget.note_loss(2.0) == 0.0
    assert budget.note_loss(3.0) is None, "the next core has died before it wrote anything"
    leave(path, None, r=5)
    assert budget.note_loss(4.0) is None


def test_what_cannot_be_read_explains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deaths.json"
    path.write_text('{"alone": 7}')
    assert read_death_record(path) == DeathRecord()
    assert RestartBudget(max_losses=0, journal_path=str(path)).note_loss(1.0) is None
