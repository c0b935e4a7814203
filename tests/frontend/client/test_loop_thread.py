"""LoopThread: calls into an event loop from threads that wait, interrupted, too late, or in a fork."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
from quire.frontend.client.loop_thread import LoopThread
from quire.ipc.errors import EngineDeadError

TIMEOUT_S = 20.0


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close(lambda: None)


def test_calls_take_effect_in_their_order_and_return_or_raise_what_the_function_does(loop: LoopThread):
    done: list[int] = []
    loop.post(done.append, 1)
    loop.call(done.append, 2)
    assert done == [1, 2]
    assert loop.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        loop.call(divmod, 7, 0)


def test_ctrl_c_in_a_wait_cancels_the_coroutine_and_leaves_the_loop_usable(loop: LoopThread):
    was_cancelled = threading.Event()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        loop.run(work)
    assert was_cancelled.wait(TIMEOUT_S)
    assert loop.call(int, "7") == 7


def test_closing_ends_calls_that_wait_and_later_ones(loop: LoopThread):
    errors: list[str] = []
    has_begun = threading.Event()

    async def work() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(work)
        except EngineDeadError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert has_begun.wait(TIMEOUT_S)
    finished: list[bool] = []
    loop.close(lambda: finished.append(True))
    waiting.join(TIMEOUT_S)
    assert (errors, finished) == (["the engine was closed"], [True])
    with pytest.raises(EngineDeadError, match="closed"):
        loop.call(int)


def test_a_call_that_is_made_while_the_loop_ends_is_answered_or_told_so(loop: LoopThread):
    answers: list[int | str] = []

    def wait() -> None:
        try:
            answers.append(loop.call(int))
        except EngineDeadError as error:
            answers.append(str(error))

    late = [threading.Thread(target=wait) for _ in range(4)]

    def start_late_calls() -> None:
        for thread in late:
            thread.start()

    loop.close(start_late_calls)
    for thread in late:
        thread.join(TIMEOUT_S)
    assert len(answers) == 4
    assert set(answers) <= {0, "the engine was closed"}


def test_what_the_garbage_collector_finds_in_the_loops_thread_closes_it_there(loop: LoopThread):
    class Owner:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            loop.call(closed_in.append, threading.current_thread().name)
            loop.close(lambda: closed_in.append("closed"))

    closed_in: list[str] = []
    gc.disable()  # in this thread
    try:
        Owner()
        loop.post(gc.collect)
        with pytest.raises(EngineDeadError, match="closed"):
            loop.run(asyncio.Event().wait)
    finally:
        gc.enable()
    assert closed_in == ["quire-client", "closed"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on, with threads
def test_in_a_fork_calls_say_so_at_once_and_closing_does_nothing(loop: LoopThread):
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # rather than hang
        try:
            loop.call(int)
        except EngineDeadError as error:
            loop.close(lambda: os._exit(2))
            os._exit("fork" not in str(error))
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert loop.call(int, "7") == 7
