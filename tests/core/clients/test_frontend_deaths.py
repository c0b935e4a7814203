"""A frontend process that is killed while its requests move from one (fake) engine of two to the other."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
from blocking_client import BlockingClient, attach_client
from daemon_loads import PACED, TIMEOUT_S, Script, is_idle, look, under_load, wait_for_tokens
from daemons import Daemon, fake_modules, runtime_folders, wait_until
from quire.frontend.daemon import drain_engine, find_log, resume_engine
from quire.ipc.protocol.messages import UtilityMethod

MAX_DRAIN_S = 10.0  # a client that is stopped is let go within 2
COUNT, MAX_TOKENS = 4, 150


@pytest.fixture(scope="module")
def client() -> Iterator[BlockingClient]:
    """Of two engines in a daemon called pair; it only looks."""
    config = msgspec.structs.replace(PACED, log_level="INFO").for_engine(0, 2)
    with (
        runtime_folders(),
        fake_modules(),
        Daemon("pair", config) as daemon,
        contextlib.closing(attach_client(daemon.name, "test")) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def nothing_left(client: BlockingClient) -> Iterator[None]:
    """Whatever happened: the same cores are there with the same clients and descriptors, and hold nothing."""
    cores = [psutil.Process(facts.pids["core"]) for facts in client.engines.values()]
    before = [(core.pid, find_clients(client, index)) for index, core in enumerate(cores)]
    num_fds = [core.num_fds() for core in cores]
    yield
    for index in client.engines:
        resume_engine("pair", index, TIMEOUT_S)
    assert wait_until(lambda: all(is_idle(client, index) for index in (0, 1)), 3.0), find_log(
        "pair"
    ).read_text()
    assert [client.call_utility(UtilityMethod.CHECK_INTEGRITY, engine=index).error for index in (0, 1)] == [
        None,
        None,
    ]
    after = [(facts.pids["core"], find_clients(client, index)) for index, facts in client.engines.items()]
    assert after == before
    assert wait_until(lambda: [core.num_fds() for core in cores] == num_fds, 3.0)


def find_clients(client: BlockingClient, index: int) -> set[int]:
    return {one.pid for one in look(client, index).clients}


def count_requests(client: BlockingClient, index: int, prefix: str) -> int:
    return sum(one.request_id.startswith(prefix) for one in look(client, index).requests)


def find_engine(client: BlockingClient, prefix: str) -> int:
    """Which engine has (most of) a client's requests."""
    return max(client.engines, key=lambda index: count_requests(client, index, prefix))


def drain_beside(index: int, act: Callable[[], object]) -> None:
    """Drain an engine while `act` runs, and in time."""
    with ThreadPoolExecutor(1) as thread:
        drain = thread.submit(drain_engine, "pair", index, MAX_DRAIN_S)
        act()
    drain.result()


@pytest.mark.parametrize("num_sends", [0, 1, 2])
def test_a_frontend_that_is_killed_with_half_of_its_move_said_leaves_nothing(
    client: BlockingClient, num_sends: int
) -> None:
    """Of its move two messages tell: the other engine gets the requests, and this one drops them."""
    with Script("pair", "victim", COUNT, MAX_TOKENS, str(num_sends)) as victim:
        victim.wait_until_busy()
        with under_load("pair", COUNT, MAX_TOKENS) as loads:
            wait_for_tokens(loads, 25)
            drained = find_engine(client, "victim")
            drain_beside(drained, lambda: None)
            assert victim.wait() == -signal.SIGKILL
            assert all(load.is_alive() for load in loads), "they had ended before"
            assert wait_until(lambda: not count_requests(client, 1 - drained, "victim"), 2.0)


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_frontend_may_be_killed_at_any_moment_of_a_drain(client: BlockingClient, delay_s: float) -> None:
    with (
        Script("pair", "victim", COUNT, MAX_TOKENS) as victim,
        Script("pair", "other", COUNT, MAX_TOKENS) as other,
    ):
        victim.wait_until_busy()
        other.wait_until_busy()
        with under_load("pair", COUNT, MAX_TOKENS) as loads:
            wait_for_tokens(loads, 25)

            def kill() -> None:
                threading.Event().wait(delay_s)
                victim.send_signal(signal.SIGKILL)

            drain_beside(find_engine(client, "victim"), kill)
            other.assert_undisturbed()


def test_a_stopped_frontend_that_is_killed_does_not_keep_an_engine_from_being_drained(
    client: BlockingClient,
) -> None:
    with Script("pair", "victim", COUNT, MAX_TOKENS) as victim:
        victim.wait_until_busy()
        with under_load("pair", COUNT, MAX_TOKENS) as loads:
            wait_for_tokens(loads, 25)
            victim.send_signal(signal.SIGSTOP)
            drained = find_engine(client, "victim")

            def kill() -> None:
                # The others have gone; of the victim, which has not heard of it, all are still there.
                assert wait_until(
                    lambda: {one.request_id[:6] for one in look(client, drained).requests} == {"victim"}, 2.0
                )
                victim.send_signal(signal.SIGKILL)

            drain_beside(drained, kill)
