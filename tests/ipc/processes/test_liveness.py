"""When a silent or late process is asked, looked at and given up: time is a number, processes are fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from child_fakes import FakeProcess
from quire.ipc.processes.liveness import (
    ASK_AFTER_S,
    DUMP_AFTER_S,
    DUMP_GRACE_S,
    KILL_AFTER_S,
    KILL_BUSY_AFTER_S,
    LISTEN_TIMEOUT_S,
    LOOK_INTERVAL_S,
    ChildWatch,
)

STAGES = (ASK_AFTER_S, DUMP_AFTER_S, KILL_AFTER_S)
SILENT = "kill: it did not answer"


def watch_silence(process: FakeProcess, is_computing: bool = False) -> ChildWatch:
    process.is_computing = is_computing
    watch = ChildWatch(process)
    watch.start(100.0)
    return watch


def look_until_killed(watch: ChildWatch, process: FakeProcess, cpu_share: float = 0.0) -> list[float]:
    """The times of all looks; the process gets its share of a processor."""
    times: list[float] = []
    while (at := watch.next_check_at) is not None:
        process.cpu_time_s = cpu_share * at
        watch.look(at)
        times.append(at)
    return times


def test_who_is_silent_is_asked_then_writes_its_stacks_then_is_killed_once_each() -> None:
    process = FakeProcess()
    watch = ChildWatch(process)
    watch.expect_listening(90.0)
    watch.note_listening()
    watch.note_heard(95.0)
    assert watch.next_check_at is None, "from `start` on"
    watch.start(100.0)
    for after_s, done in zip(STAGES, ([], ["dump"], ["dump", SILENT]), strict=True):
        assert watch.next_check_at == 100.0 + after_s
        assert not watch.look(99.9 + after_s)
        assert watch.look(100.0 + after_s) == (after_s == ASK_AFTER_S)
        assert process.done == done
    assert watch.next_check_at is None
    assert not watch.look(500.0)
    assert process.done == ["dump", SILENT]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_whatever_is_heard_begins_anew_and_a_stop_ends_the_watch(num_stages: int) -> None:
    watch = watch_silence(FakeProcess(), is_computing=True)
    for after_s in STAGES[:num_stages]:
        watch.look(100.0 + after_s)
    watch.note_heard(102.0)
    assert watch.next_check_at == 102.0 + ASK_AFTER_S
    watch.stop()
    watch.note_heard(103.0)
    assert watch.next_check_at is None


def test_a_main_thread_that_computes_gets_longer() -> None:
    process = FakeProcess()
    times = look_until_killed(watch_silence(process, is_computing=True), process, cpu_share=1.0)
    assert process.done == ["dump", SILENT]
    assert times[-1] == pytest.approx(100.0 + KILL_BUSY_AFTER_S, abs=LOOK_INTERVAL_S)
    assert len(times) - 3 == pytest.approx((KILL_BUSY_AFTER_S - KILL_AFTER_S) / LOOK_INTERVAL_S, abs=1)


@pytest.mark.parametrize(("share", "killed_after_s"), [(0.5, 20.0), (0.1, 100.0), (0.0, 200.0)])
def test_one_that_gets_little_of_a_processor_is_judged_by_what_it_gets(
    share: float, killed_after_s: float
) -> None:
    process = FakeProcess()
    silence = look_until_killed(watch_silence(process, is_computing=True), process, share)
    assert silence[-1] - 100.0 == pytest.approx(killed_after_s, rel=0.25)
    watch = ChildWatch(process)
    process.cpu_time_s = share * 100.0
    watch.expect_listening(100.0)
    start_s = look_until_killed(watch, process, share)[-1] - 100.0
    assert start_s == pytest.approx(killed_after_s * LISTEN_TIMEOUT_S / KILL_BUSY_AFTER_S, rel=0.05)


class Changing(FakeProcess):
    """Whose state is another at each look."""

    def __init__(self, states: list[bool]) -> None:
        super().__init__()
        self._states: Iterator[bool] = iter(states)

    @property
    def is_computing(self) -> bool:
        return next(self._states)

    @property
    def is_stopped(self) -> bool:
        return next(self._states)


def test_one_that_stops_computing_and_stays_silent_is_killed_at_the_second_look() -> None:
    process = Changing([True, True, True, False, True, False, False])
    watch = ChildWatch(process)
    watch.start(100.0)
    times = look_until_killed(watch, process)
    assert times[-1] == pytest.approx(100.0 + KILL_AFTER_S + 5 * LOOK_INTERVAL_S)
    assert process.done == ["dump", SILENT]


def test_one_that_computed_until_just_now_may_have_its_answer_on_the_way() -> None:
    process = Changing([True, False, False])  # when it has to write its stacks, and at two looks
    watch = ChildWatch(process)
    watch.start(100.0)
    assert look_until_killed(watch, process)[-1] == pytest.approx(100.0 + KILL_AFTER_S + LOOK_INTERVAL_S)


def test_who_owes_something_is_given_up_when_it_stays_stopped() -> None:
    process = Changing([True, True, False, True, True, True])
    watch = ChildWatch(process)
    watch.deadline.set(100.0, 300.0, "late")
    times = look_until_killed(watch, process)
    assert times == [100.5, 101.0, 101.5, 102.0, 102.5, 103.0, 103.0 + DUMP_GRACE_S]
    assert process.done == ["dump", "kill: it is stopped"]


def test_a_watcher_that_was_away_itself_asks_again_first() -> None:
    process = FakeProcess()
    watch = watch_silence(process)
    assert watch.look(100.0 + ASK_AFTER_S)
    assert watch.look(1000.0)
    assert process.done == []
    watch.look(1000.0 + DUMP_AFTER_S - ASK_AFTER_S)
    assert process.done == ["dump"]


def test_who_does_not_listen_writes_its_stacks_and_is_killed_a_moment_later() -> None:
    process = FakeProcess()
    watch = ChildWatch(process)
    watch.expect_listening(100.0)
    due_at = 100.0 + LISTEN_TIMEOUT_S
    watch.look(due_at - 0.1)
    assert process.done == []
    watch.look(due_at)
    assert process.done == ["dump"]
    assert look_until_killed(watch, process) == [due_at + DUMP_GRACE_S]
    assert process.done == ["dump", f"kill: it did not listen within {LISTEN_TIMEOUT_S:g} s"]


def test_the_first_reason_for_giving_up_counts_and_stands_whatever_is_heard_afterwards() -> None:
    process = FakeProcess()
    watch = watch_silence(process)
    watch.give_up("its connection has ended", 100.0)
    watch.give_up("another reason", 100.1)
    watch.note_heard(100.1)
    watch.start(100.1)
    watch.look(100.0 + DUMP_GRACE_S)
    assert process.done == ["dump", "kill: its connection has ended"]
