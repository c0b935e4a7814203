"""Turns and held interrupts, over a client that counts who is in it."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from frontend_fakes import FakeSyncClient
from quire.frontend.client.turns import HeldInterrupts, Turns

TIMEOUT_S = 20.0


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_comes_at_the_end_of_what_must_not_be_left_half_done():
    done: list[str] = []

    def work() -> None:
        with HeldInterrupts():
            interrupt()
            done.append("rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("way", ["where it may", "the second", "where it may later"])
def test_ctrl_c_comes_at_once(way: str):
    def work() -> None:
        with HeldInterrupts() as held:
            if way == "where it may":
                held.open()
                interrupt()
            interrupt()
            if way == "the second":
                interrupt()
            held.open()
            raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_handler_of_the_program_is_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with HeldInterrupts():
            interrupt()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_those_who_wait_are_served_by_whoever_receives():
    client = WaitingClient()
    turns = Turns(client)
    taken: list[int] = []
    served: list[int] = []

    def receive() -> bool:
        if not client.said:
            return False
        taken.append(client.said.pop(0))
        return True

    def wait_for(number: int) -> None:
        assert turns.wait_for(lambda: number in taken, receive, TIMEOUT_S)
        served.append(number)

    threads = [threading.Thread(target=wait_for, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for number in reversed(range(8)):
        client.say(number)
        threads[number].join(TIMEOUT_S)
    assert served == list(reversed(range(8)))
    assert client.max_waiting == 1


def test_a_wait_ends_with_its_time_and_with_what_receiving_raises():
    client = WaitingClient()
    turns = Turns(client)
    assert not turns.wait_for(lambda: False, lambda: False, 0.01)
    errors: list[str] = []

    def receive() -> bool:
        if client.said:
            raise RuntimeError("ended")
        return False

    def wait() -> None:
        try:
            turns.wait_for(lambda: False, receive, TIMEOUT_S)
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    client.say(0)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == ["ended"] * 4


class WaitingClient(FakeSyncClient):
    """`wait` lasts until something is said; counts how many threads are in it."""

    def __init__(self) -> None:
        super().__init__(lambda _request: [])
        self.said: list[int] = []
        self.max_waiting = 0
        self._num_waiting = 0
        self._news = threading.Event()

    def say(self, number: int) -> None:
        self.said.append(number)
        self._news.set()

    def wait(self, timeout_s: float | None = None) -> None:
        self._num_waiting += 1
        self.max_waiting = max(self.max_waiting, self._num_waiting)
        self._news.wait(timeout_s)
        self._news.clear()
        self._num_waiting -= 1

    def wake(self) -> Any:
        self._news.set()
