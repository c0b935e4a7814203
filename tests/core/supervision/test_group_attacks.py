"""Everything at once to several (fake) engines under load: losses among commands, commands among losses."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator

import daemon_loads
import pytest
from daemon_loads import (
    TIMEOUT_S,
    make_group_config,
    read_engines,
    strike,
    under_load,
    wait_for_engines,
    wait_for_tokens,
)
from daemons import Daemon, wait_until
from quire.frontend.daemon import add_engine, drain_engine, remove_engine, restart_engine, resume_engine
from quire.ipc.errors import DaemonError

MAX_TOKENS = 200


pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def three() -> Iterator[str]:
    with Daemon("three", make_group_config(3, max_core_restarts=100)) as daemon:
        yield daemon.name


@pytest.mark.parametrize(
    ("lost", "number"),
    [((0, 2), signal.SIGSTOP), pytest.param((0, 1, 2), signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_engines_that_are_lost_together_cost_no_token(
    three: str, lost: tuple[int, ...], number: signal.Signals
) -> None:
    with under_load(three, 6, MAX_TOKENS) as loads:
        wait_for_tokens(loads, 25)
        strike(three, *lost, number=number)
    assert [engine.num_restarts for engine in wait_for_engines(three).values()] == [
        int(index in lost) for index in range(3)
    ]


def test_an_engine_is_drained_and_removed_while_it_is_away(three: str) -> None:
    with under_load(three, 6, MAX_TOKENS) as loads:
        wait_for_tokens(loads, 25)
        strike(three, 1, 2)
        drain_engine(three, 1, TIMEOUT_S)
        assert read_engines(three)[1].state == "drained"
        strike(three, 1)
        assert wait_until(lambda: read_engines(three)[1].num_restarts == 2, TIMEOUT_S)
        remove_engine(three, 1, TIMEOUT_S)
    assert list(wait_for_engines(three)) == [0, 2]


def test_an_engine_is_added_in_a_failover_and_takes_what_all_others_had(three: str) -> None:
    with under_load(three, 6, MAX_TOKENS) as loads:
        wait_for_tokens(loads, 25)
        strike(three, 0, 1, 2, number=signal.SIGSTOP)
        assert add_engine(three, TIMEOUT_S) == 3
        for index in range(3):
            remove_engine(three, index, TIMEOUT_S)
    assert list(wait_for_engines(three)) == [3]


def test_the_only_engine_that_serves_is_lost_while_the_others_drain(three: str) -> None:
    with under_load(three, 6, MAX_TOKENS) as loads:
        wait_for_tokens(loads, 25)
        for index in (1, 2):
            drain_engine(three, index, TIMEOUT_S)
        strike(three, 0)
    assert [engine.state for engine in read_engines(three).values()] == ["ready", "drained", "drained"]


def test_of_drains_at_once_the_last_is_refused(three: str) -> None:
    refused: list[str] = []

    def drain(index: int) -> None:
        try:
            drain_engine(three, index, TIMEOUT_S)
        except DaemonError as error:
            refused.append(str(error))

    with under_load(three, 8):
        threads = [threading.Thread(target=drain, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(refused) == 1
        assert "cannot be drained: no other takes requests" in refused[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_together_costs_no_token(
    three: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who command and one who kills, none of whom knows of the others."""
    # What was lost with two engines runs alone; on a busy machine that takes a while.
    monkeypatch.setattr(daemon_loads, "TIMEOUT_S", 90.0)
    is_over = threading.Event()
    unexpected: list[BaseException] = []

    def act(rng: random.Random, actions: list[Callable[[int], object]]) -> None:
        while not is_over.wait(rng.uniform(0.0, 0.3)):
            index = rng.choice([*read_engines(three), 0])
            try:
                rng.choice(actions)(index)
            except DaemonError:
                pass  # in words, that it is not to be done now
            except BaseException as error:
                unexpected.append(error)

    commands: list[Callable[[int], object]] = [
        lambda index: drain_engine(three, index, 2.0),
        lambda index: resume_engine(three, index, 2.0),
        lambda index: remove_engine(three, index, 2.0),
        lambda index: restart_engine(three, 2.0, index=index),
        lambda _: add_engine(three, 2.0) if len(read_engines(three)) < 4 else None,
    ]
    kills: list[Callable[[int], object]] = [
        lambda index: strike(three, index),
        lambda index: strike(three, index, number=signal.SIGSTOP),
        lambda _: strike(three, *read_engines(three)),
    ]
    threads = [
        threading.Thread(target=act, args=(random.Random(f"{seed}/{number}"), actions))
        for number, actions in enumerate([commands, commands, kills])
    ]
    try:
        with under_load(three, 12, MAX_TOKENS) as loads:
            wait_for_tokens(loads, 10)
            for thread in threads:
                thread.start()
            is_over.wait(4.0)
            is_over.set()
    finally:
        is_over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not unexpected

    def do_all_serve_again() -> bool:
        engines = read_engines(three)
        for index in engines:
            with contextlib.suppress(DaemonError):  # a restart or removal that nobody waited for goes on
                resume_engine(three, index, TIMEOUT_S)
        return all(engine.state == "ready" for engine in engines.values())

    assert wait_until(do_all_serve_again, TIMEOUT_S), read_engines(three)
    with under_load(three, 4, 20):
        pass
