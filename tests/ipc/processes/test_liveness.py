"""When a silent or late process is asked, looked at and given up: time is a number, processes are fakes."""

from __future__ import annotations

from collections.abc import Callable

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
    Deadline,
    LivenessMonitor,
    Verdict,
)


def watch(
    is_busy: Callable[[], bool] = lambda: False, read_cpu_time_s: Callable[[], float] | None = None
) -> LivenessMonitor:
    silence = LivenessMonitor(is_busy, read_cpu_time_s or (lambda: 0.0))
    silence.start(100.0)
    return silence


def test_silence_is_asked_about_then_dumped_then_killed() -> None:
    silence = watch()
    assert silence.check(100.5) is Verdict.WAIT
    for after_s, verdict in [
        (ASK_AFTER_S, Verdict.ASK),
        (DUMP_AFTER_S, Verdict.DUMP),
        (KILL_AFTER_S, Verdict.KILL),
    ]:
        assert silence.silence_due_at == 100.0 + after_s
        assert silence.check(100.0 + after_s) is verdict
    assert silence.silence_due_at is None
    assert silence.check(500.0) is Verdict.WAIT


def test_an_answer_begins_anew() -> None:
    silence = watch()
    silence.check(100.0 + ASK_AFTER_S)
    silence.note_heard(101.0)
    assert silence.check(102.0) is Verdict.ASK


def test_a_main_thread_that_computes_gets_longer() -> None:
    now = 100.0
    silence = watch(lambda: True, lambda: now)
    verdicts = [silence.check(now := 100.0 + s) for s in (ASK_AFTER_S, DUMP_AFTER_S)]
    assert verdicts == [Verdict.ASK, Verdict.DUMP]
    looks = 0
    while (due_at := silence.silence_due_at) is not None:
        if silence.check(now := due_at) is Verdict.WAIT:
            looks += 1
    assert now == pytest.approx(100.0 + KILL_BUSY_AFTER_S, abs=LOOK_INTERVAL_S)
    assert looks == pytest.approx((KILL_BUSY_AFTER_S - KILL_AFTER_S) / LOOK_INTERVAL_S, abs=1)


@pytest.mark.parametrize(("share", "killed_after_s"), [(0.5, 20.0), (0.1, 100.0), (0.0, 200.0)])
def test_one_that_gets_little_of_a_processor_is_judged_by_what_it_gets(
    share: float, killed_after_s: float
) -> None:
    now = 100.0
    silence = watch(lambda: True, lambda: share * now)
    while (due_at := silence.silence_due_at) is not None:
        silence.check(now := due_at)
    assert now - 100.0 == pytest.approx(killed_after_s, rel=0.25)
    now, process = 100.0, FakeProcess()
    process.is_computing = True
    child = ChildWatch(process)
    child.expect_listening(now)
    while not process.done:
        now = child.next_check_at or 0.0
        process.cpu_time_s = share * now
        child.look(now)
    assert now - 100.0 == pytest.approx(killed_after_s * LISTEN_TIMEOUT_S / KILL_BUSY_AFTER_S, rel=0.05)


def test_one_that_stops_computing_and_stays_silent_is_killed_at_the_second_look() -> None:
    states = iter([True, True, False, True, False, False])
    silence = watch(lambda: next(states))
    for after_s in (ASK_AFTER_S, DUMP_AFTER_S):
        silence.check(100.0 + after_s)
    verdicts = [silence.check(100.0 + KILL_AFTER_S + i * LOOK_INTERVAL_S) for i in range(6)]
    assert verdicts == [Verdict.WAIT] * 5 + [Verdict.KILL]


def test_a_busy_one_that_answers_is_watched_from_the_beginning() -> None:
    silence = watch(lambda: True)
    for after_s in (ASK_AFTER_S, DUMP_AFTER_S, KILL_AFTER_S):
        silence.check(100.0 + after_s)
    silence.note_heard(102.0)
    assert silence.silence_due_at == 102.0 + ASK_AFTER_S


def test_a_watcher_that_was_away_itself_asks_again_first() -> None:
    silence = watch()
    assert silence.check(100.0 + ASK_AFTER_S) is Verdict.ASK
    assert silence.check(1000.0) is Verdict.ASK
    assert silence.check(1000.0 + DUMP_AFTER_S - ASK_AFTER_S) is Verdict.DUMP


def test_nothing_is_due_while_nothing_is_watched() -> None:
    silence = LivenessMonitor(lambda: False, lambda: 0.0)
    silence.note_heard(1.0)
    assert silence.silence_due_at is None
    silence.start(1.0)
    silence.stop()
    assert silence.check(99.0) is Verdict.WAIT


def test_who_owes_something_is_given_up_when_it_stays_stopped() -> None:
    looks = iter([True, True, False, True, True, True])
    deadline = Deadline(lambda: next(looks))
    deadline.set(100.0, 300.0, "late")
    assert deadline.next_check_at == 100.5
    assert deadline.find_overdue(100.4) is None, "looked too early"
    assert [deadline.find_overdue(100.5 + 0.5 * i) for i in range(6)] == [None] * 5 + ["it is stopped"]
    assert deadline.next_check_at is None


def test_who_does_not_listen_writes_its_stacks_and_is_killed_a_moment_later() -> None:
    process = FakeProcess()
    watch = ChildWatch(process)
    watch.expect_listening(100.0)
    due_at = 100.0 + LISTEN_TIMEOUT_S
    watch.look(due_at - 0.1)
    assert process.done == []
    watch.look(due_at)
    assert process.done == ["dump"]
    assert watch.next_check_at == due_at + DUMP_GRACE_S
    watch.check_deadline(due_at + DUMP_GRACE_S)
    assert process.done == ["dump", f"kill: it did not listen within {LISTEN_TIMEOUT_S:g} s"]
    assert watch.next_check_at is None
    watch.look(due_at + 100.0)
    assert len(process.done) == 2


def test_who_listens_in_time_is_asked_after_a_silence_and_killed_if_it_does_not_answer() -> None:
    process = FakeProcess()
    watch = ChildWatch(process)
    watch.expect_listening(100.0)
    watch.note_listening()
    assert watch.next_check_at is None
    watch.start(101.0)
    assert [watch.look(101.0 + after_s) for after_s in (0.1, ASK_AFTER_S, DUMP_AFTER_S, KILL_AFTER_S)] == [
        False,
        True,
        False,
        False,
    ]
    assert process.done == ["dump", "kill: it did not answer"]


def test_the_first_reason_for_giving_up_counts_and_stands_whatever_is_heard_afterwards() -> None:
    process = FakeProcess()
    watch = ChildWatch(process)
    watch.start(100.0)
    watch.give_up("its connection has ended", 100.0)
    watch.give_up("another reason", 100.1)
    watch.note_heard(100.1)
    watch.start(100.1)
    watch.look(100.0 + DUMP_GRACE_S)
    assert process.done == ["dump", "kill: its connection has ended"]


def test_a_check_of_the_deadline_leaves_the_question_to_the_next_look() -> None:
    watch = ChildWatch(FakeProcess())
    watch.start(100.0)
    watch.check_deadline(100.0 + ASK_AFTER_S)
    assert watch.look(100.0 + ASK_AFTER_S)
