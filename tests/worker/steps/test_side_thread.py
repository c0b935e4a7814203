"""SideThread: work is done once, by one of two, and its result or its error comes to who waits."""

from __future__ import annotations

import gc
import threading

import pytest
from quire.worker.steps.side_thread import SideJob, SideThread


def test_the_other_thread_does_what_the_caller_leaves_to_it() -> None:
    side, done = SideThread(), threading.Event()

    def work() -> int:
        done.set()
        return threading.get_ident()

    job = side.start(work)
    assert done.wait(10)
    assert job.wait() != threading.get_ident()


def test_the_caller_does_what_the_other_thread_has_not_begun() -> None:
    side, go_on, has_begun = SideThread(), threading.Event(), threading.Event()
    blocked = side.start(lambda: (has_begun.set(), go_on.wait(10)))
    assert has_begun.wait(10)
    assert side.start(threading.get_ident).wait() == threading.get_ident()
    go_on.set()
    assert blocked.wait()[1]


def test_who_waits_waits_for_the_end_and_gets_the_error() -> None:
    side, has_begun, go_on = SideThread(), threading.Event(), threading.Event()

    def work() -> None:
        has_begun.set()
        assert go_on.wait(10)
        raise ValueError("bad")

    job = side.start(work)
    assert has_begun.wait(10)
    timer = threading.Timer(0.0, go_on.set)
    timer.start()
    with pytest.raises(ValueError, match="bad"):
        job.wait()
    timer.join()
    job.drop()
    assert side.start(lambda: 1).wait() == 1, "the thread lives on"


def test_a_dropped_job_is_done_or_will_never_be() -> None:
    calls: list[int] = []
    job = SideJob(lambda: calls.append(1))
    job.drop()
    job.run()
    assert calls == []
    job = SideJob(lambda: calls.append(2))
    job.run()
    job.drop()
    assert calls == [2]


def test_the_thread_ends_with_its_owner() -> None:
    side, threads = SideThread(), set(threading.enumerate())
    side.start(lambda: None).wait()
    [thread] = set(threading.enumerate()) - threads
    del side
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
