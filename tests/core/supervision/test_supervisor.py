"""The supervisor, its (fake) cores and their clients: what dies, who notices, and that no token is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from blocking_client import attach_client
from daemon_loads import (
    PACED,
    TIMEOUT_S,
    Load,
    ask,
    assert_undisturbed,
    collect,
    finish,
    is_idle,
    make_named_config,
    make_requests,
    read_stats,
    under_load,
    wait_for_tokens,
)
from daemons import Daemon, wait_for_end, wait_until
from fakes import make_request
from quire.frontend.client.async_engine_core_client import attach_async_client
from quire.frontend.client.engine_connection import EngineSocket
from quire.frontend.daemon import (
    DaemonStarter,
    find_log,
    restart_engine,
    start_daemon,
    stop_daemon,
)
from quire.ipc.daemon.daemon_state import SupervisorArgs, read_state
from quire.ipc.daemon.run_dir import find_daemon, find_named, list_daemons
from quire.ipc.errors import DaemonError, EngineDeadError
from quire.ipc.processes.restarts import MAX_LOSSES
from quire.ipc.protocol.client_protocol import GOODBYE
from quire.ipc.protocol.messages import UtilityMethod

pytestmark = pytest.mark.usefixtures("runtime")


# The core is lost.


def test_a_killed_core_costs_64_streams_no_token(daemon: Daemon) -> None:
    with under_load(daemon.name, max_tokens=100) as loads:
        wait_for_tokens(loads, 250)
        os.kill(daemon.core_pid, signal.SIGKILL)
    assert daemon.num_restarts == 1
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        assert is_idle(client)
        assert client.call_utility(UtilityMethod.CHECK_INTEGRITY).error is None


@pytest.mark.slow
def test_a_core_killed_five_times_at_any_moment_costs_no_token(daemon: Daemon) -> None:
    rng = random.Random(7)
    with under_load(daemon.name, 16, 200) as loads:
        for number in range(MAX_LOSSES):
            at = sum(load.num_tokens for load in loads) + rng.randrange(1, 300)
            wait_until(lambda at=at: sum(load.num_tokens for load in loads) >= at, 0.5 * rng.random())
            os.kill(daemon.core_pid, signal.SIGKILL)
            assert wait_until(lambda number=number: daemon.num_restarts > number, TIMEOUT_S)
            if rng.random() < 0.7:
                daemon.wait_until_ready(number + 1)
            else:  # the next kill is during its start
                assert wait_until(lambda: _has_core(daemon), TIMEOUT_S)
    assert daemon.num_restarts == MAX_LOSSES


def _has_core(daemon: Daemon) -> bool:
    with contextlib.suppress(AssertionError):
        return daemon.core_pid > 0
    return False


def test_a_request_added_while_there_is_no_core_waits_for_it(daemon: Daemon) -> None:
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        os.kill(daemon.core_pid, signal.SIGKILL)
        wait_for_end(client.facts.pids["core"])
        requests = make_requests("waits", 5, 20)
        client.add_requests(requests)
        client.abort_requests(["waits-4"])
        outputs = collect(client, {request.request_id for request in requests})
        assert_undisturbed(requests[:4], outputs)
        assert str(outputs["waits-4"][-1].finish_reason) == "abort"
        assert read_stats(client).generation_tokens_total <= 5 * 30


def test_a_call_that_the_core_did_not_live_to_answer_is_answered_by_the_next(daemon: Daemon) -> None:
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        os.kill(daemon.core_pid, signal.SIGSTOP)
        timer = threading.Timer(0.1, os.kill, (daemon.core_pid, signal.SIGKILL))
        timer.start()
        assert read_stats(client).num_steps_total == 0
        timer.join()


@pytest.mark.timeout(30)
def test_a_welcome_that_comes_while_a_client_sends_is_not_missed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EngineSocket.send

    def send(self: EngineSocket, frames: tuple[bytes]) -> bool:
        is_sent = original(self, frames)
        if frames != GOODBYE:
            self._socket.poll(5000, zmq.POLLIN)  # the answer arrives, and the descriptor's edge is gone
        return is_sent

    monkeypatch.setattr(EngineSocket, "send", send)
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        assert client.facts.max_model_len


def test_a_core_killed_while_it_starts_is_started_again() -> None:
    config = make_named_config("unready")
    launch = SupervisorArgs(name="start", config=config)
    starter = DaemonStarter(launch)
    directory = find_named("start")
    killed: list[int] = []

    class EnoughError(Exception):
        pass

    def kill_core(phase: str) -> None:
        state = read_state(directory)
        if phase == "load fake weights" and state is not None and state.core_pid is not None:
            if len(killed) == 2:
                raise EnoughError
            killed.append(state.core_pid)
            os.kill(state.core_pid, signal.SIGKILL)

    with pytest.raises(EnoughError):  # two were killed, and a third one starts
        starter.wait_until_ready(kill_core)
    assert len(set(killed)) == 2
    assert starter.child.exit_code == 0
    assert not directory.exists()


def test_a_used_up_budget_ends_the_daemon_with_one_reason_and_every_client_is_told(daemon: Daemon) -> None:
    loads = [
        Load(daemon.name, make_requests("sync", 4, 300)),
        Load(daemon.name, make_requests("async", 4, 300)),
    ]
    for load in loads:
        load.start()
        wait_for_tokens([load], 1)  # one that has not attached yet would say that there never was an engine

    def has_ended() -> bool:
        return os.waitid(os.P_PID, daemon.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def is_ready_or_over(number: int) -> bool:
        state = read_state(find_named(daemon.name))
        is_ready = state is not None and state.state == "ready" and state.num_restarts >= number
        return (is_ready and all(map(has_got_on, loads))) or has_ended()

    def has_got_on(load: Load) -> bool:  # else it would be suspected of the deaths, which then do not count
        counts = {name: len(outputs) for name, outputs in list(load.outputs.items())}
        return len(counts) == 4 and all(counts[name] > seen.get(name, 0) for name in counts)

    seen: dict[str, int] = {}
    for number in range(MAX_LOSSES + 1):
        assert wait_until(lambda number=number: is_ready_or_over(number), TIMEOUT_S)
        assert not has_ended()
        seen = {name: len(outputs) for load in loads for name, outputs in list(load.outputs.items())}
        os.kill(daemon.core_pid, signal.SIGKILL)
    assert wait_until(has_ended, TIMEOUT_S)
    for load in loads:
        with pytest.raises(EngineDeadError, match=f"the daemon 'paced' .pid {daemon.pid}. has ended"):
            load.finish()
    wait_for_end(daemon.pid)
    assert not find_named(daemon.name).exists()
    lines = find_log(daemon.name).read_text().splitlines()
    assert "has failed" in lines[-1]
    assert lines[-1].endswith("was killed by SIGKILL, 6 times in 60 s")
    assert sum("has failed" in line for line in lines) == 1


def test_a_restart_that_is_refused_ends_the_daemon_with_the_cause(tmp_path: Path) -> None:
    config = make_named_config("refused-later", str(tmp_path / "mark"))
    with (
        Daemon("later", config) as daemon,
        contextlib.closing(attach_client("later", "test")) as client,
    ):
        with pytest.raises(DaemonError, match="ended meanwhile"):
            restart_engine("later", TIMEOUT_S)
        with pytest.raises(EngineDeadError, match=r"model='refused-later': expected a folder|has ended"):
            client.get_outputs(TIMEOUT_S)
        wait_for_end(daemon.pid)
        assert "model='refused-later': expected a folder" in find_log("later").read_text()


def test_sighup_restarts_the_engine_and_costs_no_token(daemon: Daemon) -> None:
    with under_load(daemon.name, 8) as loads:
        wait_for_tokens(loads, 50)
        before = daemon.core_pid
        restart_engine(daemon.name, TIMEOUT_S)
        assert daemon.core_pid != before
    assert daemon.num_restarts == 1
    assert "lost" not in find_log(daemon.name).read_text()


def test_a_restart_between_two_starts_begins_at_once(daemon: Daemon) -> None:
    for number in range(4):  # the next start is 0.4 s away
        daemon.wait_until_ready(number)
        os.kill(daemon.core_pid, signal.SIGKILL)
    assert wait_until(lambda: daemon.num_restarts == 4 and not _has_core(daemon), TIMEOUT_S)
    restart_engine(daemon.name, timeout_s=5.0)


# The supervisor is lost.


def test_a_killed_supervisor_ends_everything_and_clients_are_told(daemon: Daemon) -> None:
    core_pid = daemon.core_pid
    loads = [
        Load(daemon.name, make_requests("sync", 8, 200)),
        Load(daemon.name, make_requests("a", 8, 200)),
    ]
    for load in loads:
        load.start()
    wait_for_tokens(loads, 50)
    os.kill(daemon.pid, signal.SIGKILL)
    for load in loads:
        with pytest.raises(EngineDeadError, match="'paced'"):
            load.finish()
    wait_for_end(core_pid, 2.0)
    assert find_named(daemon.name).exists(), "what it left is there for the next one to take over"
    assert list_daemons() == []
    os.waitpid(daemon.pid, 0)
    with pytest.raises(DaemonError, match="no daemon named 'paced'"):
        attach_client(daemon.name, "test")
    with Daemon(daemon.name, PACED), under_load(daemon.name, 2, 20):
        pass
    assert not find_named(daemon.name).exists()


def test_a_stopped_core_does_not_outlive_a_killed_supervisor(daemon: Daemon) -> None:
    os.kill(daemon.core_pid, signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGKILL)
    os.waitpid(daemon.pid, 0)
    wait_for_end(daemon.core_pid, 3.0)


def test_a_daemon_can_be_started_while_the_dead_ones_core_is_still_leaving(daemon: Daemon) -> None:
    old_core = daemon.core_pid

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(old_core, number)

    send(signal.SIGSTOP)
    os.kill(daemon.pid, signal.SIGKILL)
    os.waitpid(daemon.pid, 0)
    send(signal.SIGSTOP)  # once more: it leaves late, and then removes the files of its sockets
    timer = threading.Timer(0.6, send, (signal.SIGCONT,))
    timer.start()
    with Daemon(daemon.name, PACED):
        timer.join()
        wait_for_end(old_core)
        with under_load(daemon.name, 2, 20):
            pass


def test_a_client_does_not_go_over_to_another_daemon_of_the_same_name(daemon: Daemon) -> None:
    async def run() -> None:
        client = await attach_async_client(daemon.name, "test")
        client.add_request(make_request("r", [1], max_tokens=None))
        await client.get_outputs()

        async def read_for_ever() -> None:
            while True:
                await client.get_outputs()

        stop_daemon(daemon.name)  # all of this while the event loop stands still
        os.waitpid(daemon.pid, 0)
        with Daemon(daemon.name, PACED):
            with pytest.raises(EngineDeadError, match="has ended"):
                await read_for_ever()
            with contextlib.closing(attach_client(daemon.name, "test")) as other:
                assert read_stats(other).num_steps_total == 0, "the other daemon was given the request"
            client.close()

    asyncio.run(run())


def test_a_closed_attached_client_says_so(daemon: Daemon) -> None:
    client = attach_client(daemon.name, "test")
    client.close()
    for use in (lambda: client.add_request(make_request("r", [1])), client.get_outputs):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


# What lies on disk is lost, or the disk is full.


def test_a_daemon_whose_directory_is_deleted_goes_on_and_is_found_again(daemon: Daemon) -> None:
    with under_load(daemon.name, 8) as loads:
        wait_for_tokens(loads, 50)
        shutil.rmtree(find_named(daemon.name).parent)
        with pytest.raises(DaemonError, match=f"is running already .pid {daemon.pid}."):
            start_daemon(daemon.name, PACED)
    assert (daemon.num_restarts, find_daemon(daemon.name)) == (0, daemon.pid)
    assert wait_until(lambda: (find_named(daemon.name) / "core.sock").exists(), TIMEOUT_S)
    with contextlib.closing(attach_client(daemon.name, "test")) as client:
        ask(client, "later")
    assert list_daemons() == [daemon.name]
    restart_engine(daemon.name, TIMEOUT_S)
    pid = daemon.core_pid
    stop_daemon(daemon.name)
    wait_for_end(pid)
    assert not find_named(daemon.name).exists()


def test_a_full_disk_prevents_and_ends_nothing_and_a_restart_is_noticed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # neither state, journal nor log takes a byte
    try:
        with Daemon("full", PACED) as daemon:
            with under_load("full", 8) as loads:
                wait_for_tokens(loads, 50)
                restart_engine("full", TIMEOUT_S)
                os.kill(daemon.core_pid, signal.SIGKILL)
            assert daemon.num_restarts == 2
            assert list_daemons() == ["full"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not find_named("full").exists()


def test_a_core_short_of_descriptors_lets_nobody_in_rather_than_abort(daemon: Daemon) -> None:
    pid = daemon.core_pid
    core = psutil.Process(pid)
    path = find_named(daemon.name) / "core.sock"
    connections: list[socket.socket] = []
    with (
        contextlib.closing(attach_client(daemon.name, "test")) as client,
        contextlib.ExitStack() as stack,
    ):
        num_before = core.num_fds() - 3  # some of them may be open for a moment only
        # A forked core has as many open as the process of the tests: most are free at first whatever that is.
        limit = 5 * num_before + 100
        core.rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            for _ in range(limit):
                connections.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                connections[-1].connect(str(path))
                least = num_before + len(connections)
                assert wait_until(lambda least=least: core.num_fds() >= least or not path.exists(), 5.0)
        assert num_before + len(connections) < limit / 2
        ask(client, "still")
        stack.close()
        attach_client(daemon.name, "test").close()  # waits until it is let in
    assert (daemon.core_pid, daemon.num_restarts) == (pid, 0)


def test_a_flood_of_connections_during_a_slow_turn_does_not_end_the_core() -> None:
    hooks = ",".join(f"core.schedule:slow@{step}" for step in range(1, 6))
    with (
        Daemon("slow", msgspec.structs.replace(PACED, fault_hooks=hooks)) as daemon,
        contextlib.closing(attach_client(daemon.name, "test")) as client,
        contextlib.ExitStack() as stack,
    ):
        pid = daemon.core_pid
        limit = psutil.Process(pid).num_fds() + 400
        psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE, (limit, limit))
        requests = make_requests("flooded", 2, 20)
        client.add_requests(requests)
        num_connected, path = 0, str(find_named("slow") / "core.sock")
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            while num_connected < 2 * limit:  # each as soon as there is room for it in the socket's queue
                stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
                num_connected += 1
        assert num_connected < limit
        finish(client, requests)
        assert (daemon.core_pid, daemon.num_restarts) == (pid, 0)
