"""The restart budget: at once, then later and later, then not any more."""

from __future__ import annotations

from quire.ipc.processes.restarts import LOSS_WINDOW_S, MAX_BACKOFF_S, MAX_LOSSES, RestartBudget


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer_and_longer() -> None:
    budget = RestartBudget()
    waits = [budget.note_loss(float(i)) for i in range(MAX_LOSSES)]
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8]
    assert max(wait or 0.0 for wait in waits) <= MAX_BACKOFF_S
    assert budget.note_loss(float(MAX_LOSSES)) is None


def test_losses_are_forgotten_after_the_window() -> None:
    budget = RestartBudget()
    for i in range(10 * MAX_LOSSES):
        assert budget.note_loss(i * LOSS_WINDOW_S / MAX_LOSSES) is not None
    assert budget.note_loss(1e6) == 0.0


def test_losses_that_are_forgiven_count_no_more() -> None:
    budget = RestartBudget(max_losses=1)
    assert budget.note_loss(1.0) == 0.0
    budget.forgive()
    assert [budget.note_loss(2.0), budget.note_loss(3.0)] == [0.0, None]


def test_limits_are_counted_and_named_as_given() -> None:
    budget = RestartBudget(max_losses=200, window_s=0.5)
    assert [budget.note_loss(100.0) for _ in range(201)].count(None) == 1
    assert budget.excess == "201 times in 0.5 s"
    assert budget.note_loss(100.5) == 0.0
    assert RestartBudget(max_losses=0).note_loss(1.0) is None
