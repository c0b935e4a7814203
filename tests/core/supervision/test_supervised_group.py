"""A supervisor of several (fake) engines: what it says of them, commands, losses, what is left."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest
from bare_client import BareClient
from daemon_loads import (
    TIMEOUT_S,
    make_group_config,
    read_engines,
    strike,
    under_load,
    wait_for_engines,
    wait_for_tokens,
)
from daemons import Daemon, wait_for_end
from fakes import make_request
from quire.frontend.daemon import (
    add_engine,
    drain_engine,
    find_log,
    remove_engine,
    restart_engine,
    resume_engine,
    start_daemon,
)
from quire.ipc.daemon.daemon_control import CONTROL_SOCKET_NAME
from quire.ipc.daemon.daemon_state import read_state
from quire.ipc.daemon.run_dir import find_named
from quire.ipc.errors import DaemonError, ModelError
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutputs,
    EngineRoster,
    Hello,
    Welcome,
)
from quire.ipc.protocol.sockets import make_ipc_address

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(scope="module")
def pair() -> Iterator[str]:
    """Two engines for all tests that leave two behind."""
    with Daemon("pair", make_group_config(2)) as daemon:
        yield daemon.name


class Listener(BareClient):
    """A client of one engine that only listens, and may add requests."""

    def __init__(self, name: str, socket_name: str) -> None:
        super().__init__(make_ipc_address(str(find_named(name) / socket_name)))
        self.send(Hello(PROTOCOL_VERSION, "test", os.getpid()))

    def wait_for_roster(self, expected: list[tuple[int, bool, bool]]) -> None:
        """Until it is told of these engines: (index, is_draining, is_away)."""

        def is_it(message: msgspec.Struct) -> bool:
            roster = message.roster if isinstance(message, Welcome) else message
            if not isinstance(roster, EngineRoster):
                return False
            return [(one.index, one.is_draining, one.is_away) for one in roster.engines] == expected

        self.wait_for(is_it)

    def finish(self, request_id: str) -> None:
        """Wait for a request's end."""
        self.wait_for(
            lambda message: (
                isinstance(message, EngineCoreOutputs)
                and any(
                    one.request_id == request_id and one.finish_reason is not None for one in message.outputs
                )
            )
        )


def test_clients_are_told_of_a_loss_and_of_the_return_and_the_other_core_stays(pair: str) -> None:
    before = wait_for_engines(pair)
    assert [one.socket for one in before.values()] == ["core.sock", "core1.sock"]
    with Listener(pair, "core.sock") as listener:
        listener.wait_for_roster([(0, False, False), (1, False, False)])
        strike(pair, 1)
        listener.wait_for_roster([(0, False, False), (1, False, True)])
        listener.wait_for_roster([(0, False, False), (1, False, False)])
    after = wait_for_engines(pair, lambda engines: engines[1].state == "ready")
    assert after[0].pid == before[0].pid
    assert after[1].num_restarts == before[1].num_restarts + 1
    assert "was killed by SIGKILL" in after[1].last_loss
    assert not after[0].last_loss


def test_a_drained_engine_ends_what_it_has_and_takes_requests_again_when_told(pair: str) -> None:
    with Listener(pair, "core1.sock") as listener:
        listener.wait_for_roster([(0, False, False), (1, False, False)])
        listener.send(make_request("r", [1, 2, 3], max_tokens=100))
        drain_engine(pair, 1, TIMEOUT_S)
        assert read_engines(pair)[1].state == "drained"
        listener.wait_for_roster([(0, False, False), (1, True, False)])
        listener.finish("r")
        with pytest.raises(DaemonError, match="engine 0 cannot be drained: no other takes requests"):
            drain_engine(pair, 0, TIMEOUT_S)
        with pytest.raises(DaemonError, match="engine 0 cannot be removed: no other takes requests"):
            remove_engine(pair, 0, TIMEOUT_S)
        resume_engine(pair, 1, TIMEOUT_S)
        listener.wait_for_roster([(0, False, False), (1, False, False)])
    assert read_engines(pair)[1].state == "ready"


def test_streams_go_on_elsewhere_when_their_engine_is_killed_or_drained(pair: str) -> None:
    before = read_engines(pair)
    with under_load(pair, 6, 240) as loads:
        wait_for_tokens(loads, 25)
        drain_engine(pair, 1, TIMEOUT_S)
        assert all(load.is_alive() for load in loads), "it was drained though its streams had not ended"
        resume_engine(pair, 1, TIMEOUT_S)
        strike(pair, 0)
        wait_for_engines(pair, lambda engines: engines[0].num_restarts > before[0].num_restarts)
    wait_for_engines(pair, lambda engines: engines[0].state == "ready")
    assert read_engines(pair)[1].num_restarts == before[1].num_restarts


def test_a_restart_rolls_while_one_engine_serves_at_any_time(pair: str) -> None:
    before = read_engines(pair)
    restart = threading.Thread(target=restart_engine, args=(pair, TIMEOUT_S))
    seen: set[tuple[str, ...]] = set()
    with under_load(pair, 8) as loads:
        wait_for_tokens(loads, 25)
        restart.start()
        while restart.is_alive():
            seen.add(tuple(engine.state for engine in read_engines(pair).values()))
    assert all("ready" in states for states in seen), seen
    assert {("restarting", "ready"), ("ready", "restarting")} <= seen
    after = read_engines(pair)
    for index in (0, 1):
        assert after[index].pid != before[index].pid
        assert after[index].num_restarts == before[index].num_restarts + 1
        assert after[index].state == "ready"
    restart_engine(pair, TIMEOUT_S, index=1)
    last = read_engines(pair)
    assert (last[0].pid, last[1].num_restarts) == (after[0].pid, after[1].num_restarts + 1)


def test_engines_are_added_and_removed_and_numbers_are_not_used_again(pair: str) -> None:
    with Listener(pair, "core.sock") as listener:
        assert add_engine(pair, TIMEOUT_S) == 2
        listener.wait_for_roster([(0, False, False), (1, False, False), (2, False, False)])
        pid = read_engines(pair)[2].pid
        remove_engine(pair, 2, TIMEOUT_S)
        listener.wait_for_roster([(0, False, False), (1, False, False)])
        assert pid is not None
        wait_for_end(pid)
        assert list(read_engines(pair)) == [0, 1]
        assert add_engine(pair, TIMEOUT_S) == 3
    remove_engine(pair, 3, TIMEOUT_S)
    with pytest.raises(DaemonError, match="there is no engine 3; there are 0, 1"):
        drain_engine(pair, 3, TIMEOUT_S)


def test_commands_come_also_when_a_cleaner_has_removed_their_socket(pair: str) -> None:
    (find_named(pair) / CONTROL_SOCKET_NAME).unlink()
    resume_engine(pair, 1, TIMEOUT_S)


def test_streams_of_an_only_engine_go_on_at_one_that_takes_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="quire.frontend.client")
    with Daemon("only", make_group_config(1)):
        with under_load("only", 4, 150) as loads:
            wait_for_tokens(loads, 10)
            assert add_engine("only", TIMEOUT_S) == 1
            remove_engine("only", 0, TIMEOUT_S)
            assert list(read_engines("only")) == [1]
            assert not (find_named("only") / "core.sock").exists()
        with under_load("only", 2, 20):
            pass  # who comes now finds it
    told = [record.getMessage() for record in caplog.records if "was removed" in record.getMessage()]
    assert len(told) <= 2, "a client of the two that saw it has gone by an old roster"


def test_an_engine_that_is_lost_for_good_leaves_the_others_and_a_restart_brings_it_back() -> None:
    with Daemon("few", make_group_config(2, max_core_restarts=0)) as daemon:
        strike("few", 0)
        engines = wait_for_engines("few", lambda engines: engines[0].state == "lost")
        assert "was killed by SIGKILL, once in 60 s" in engines[0].last_loss
        state = read_state(find_named("few"))
        assert state is not None
        assert (state.state, state.core_pid) == ("ready", engines[1].pid)
        log = find_log("few").read_text()
        assert "quire: engine 0 is lost" in log
        assert "quire engine 1: replays are" in log, "each says who it is"
        assert not (find_named("few") / "core.sock").exists(), "it leads nowhere"
        with pytest.raises(DaemonError, match="engine 0 is lost"):
            resume_engine("few", 0, TIMEOUT_S)
        with Listener("few", "core1.sock") as listener:
            listener.wait_for_roster([(1, False, False)])
            restart_engine("few", TIMEOUT_S, index=0)
            listener.wait_for_roster([(0, False, False), (1, False, False)])
        strike("few", 0, 1)
        os.waitpid(daemon.pid, 0)
        assert not find_named("few").exists()
        assert "has failed" in find_log("few").read_text().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_engines_end_with_their_supervisor(number: signal.Signals) -> None:
    with Daemon("ending", make_group_config(3)) as daemon:
        pids = [engine.pid for engine in read_engines("ending").values()]
        assert len(set(pids)) == 3
        os.kill(daemon.pid, number)
        os.waitpid(daemon.pid, 0)
        for pid in pids:
            assert pid is not None
            wait_for_end(pid)
        assert find_named("ending").exists() == (number is signal.SIGKILL)


def test_a_group_whose_engines_cannot_start_is_refused_with_the_cause() -> None:
    with pytest.raises(ModelError, match="model='missing': expected a folder"):
        start_daemon("bad", make_group_config(2, "missing"))
    assert not find_named("bad").exists()
