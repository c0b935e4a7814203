"""One place that processes take one after the other: time is a number, processes are fakes."""

from __future__ import annotations

import pytest
from child_fakes import FakeProcess
from quire.ipc.processes.liveness import DUMP_GRACE_S
from quire.ipc.processes.managed_child import ManagedChild
from quire.ipc.processes.restarts import RestartBudget


def manage(max_losses: int = 1) -> tuple[ManagedChild[FakeProcess], list[FakeProcess]]:
    started: list[FakeProcess] = []

    def start() -> FakeProcess:
        started.append(FakeProcess())
        return started[-1]

    return ManagedChild(start, RestartBudget(max_losses)), started


def test_a_lost_process_is_replaced_when_the_budget_says_and_the_next_one_is_watched_anew() -> None:
    child, started = manage(max_losses=2)
    watch = child.start()
    watch.give_up("it hangs", 100.0)
    assert child.next_check_at == watch.next_check_at == pytest.approx(100.0 + DUMP_GRACE_S)
    for lost_at, start_at in [(100.2, 100.2), (101.0, 101.1)]:
        assert child.replace(child.stop(0.0), lost_at)
        assert child.next_check_at == child.start_at == pytest.approx(start_at)
        assert not child.is_due(start_at - 0.01)
        assert child.is_due(start_at + 0.01)
        child.start()
        assert child.start_at is None
        assert not child.is_due(500.0)
    assert child.watch is not None
    assert child.watch is not watch
    assert child.watch.kill_reason is None
    assert child.watch.next_check_at is None
    assert started[0].done == ["dump", "stop: 0"]
    assert started[2].done == []


def test_a_process_that_replaces_one_that_was_not_stopped_ends_it_and_has_a_watch_of_its_own() -> None:
    child, started = manage()
    watch = child.start()
    assert child.start() is child.watch is not watch
    assert [process.done for process in started] == [["stop: 0"], []]


def test_a_process_that_is_lost_too_often_has_no_other_and_the_reason_says_so() -> None:
    child, started = manage(max_losses=1)
    for _ in range(2):
        child.start()
        reason = child.stop(0.0)
        can_go_on = child.replace(reason, 100.0)
    assert not can_go_on
    assert child.end_reason == "child (pid 7) was killed by SIGKILL, 2 times in 60 s"
    assert child.start_at is None
    assert len(started) == 2


def test_a_start_that_fails_leaves_what_was_known_and_stays_due() -> None:
    starts = iter([FakeProcess(), OSError("no descriptors"), FakeProcess()])

    def start() -> FakeProcess:
        one = next(starts)
        if isinstance(one, OSError):
            raise one
        return one

    child = ManagedChild(start, RestartBudget())
    child.start()
    assert child.process is not None
    assert child.replace(child.process.describe_exit(), 100.0)
    with pytest.raises(OSError, match="no descriptors"):
        child.start()
    assert child.is_due(100.0)
    assert child.process is not None
    child.start()
    assert not child.is_due(100.0)


def test_what_is_stopped_is_stopped_once() -> None:
    child, started = manage()
    assert child.stop(1.0) == ""
    child.start()
    assert child.stop(1.5) == "child (pid 7) was killed by SIGKILL"
    assert child.stop(1.5) == ""
    assert started[0].done == ["stop: 1.5"]
