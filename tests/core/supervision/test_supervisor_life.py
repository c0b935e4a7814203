"""How supervisors start and stop, what they leave, and what they hold meanwhile."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil
import pytest
from blocking_client import attach_client
from daemon_loads import (
    PACED,
    TIMEOUT_S,
    make_named_config,
)
from daemons import Daemon, wait_for_end, wait_until
from quire.frontend.daemon import (
    DaemonStarter,
    inspect_daemon,
    restart_engine,
    start_daemon,
    stop_daemon,
)
from quire.ipc.daemon.daemon_state import SupervisorArgs
from quire.ipc.daemon.run_dir import RunDirectory, find_named
from quire.ipc.errors import DaemonError, EngineStartError, ModelError

pytestmark = pytest.mark.usefixtures("runtime")


def test_stopping_ends_every_process_and_removes_the_run_directory(daemon: Daemon) -> None:
    info = inspect_daemon(daemon.name)
    assert info is not None
    assert (info.state, info.clients, info.restarts, info.num_running) == ("ready", 0, 0, 0)
    assert [process.role for process in info.processes] == ["supervisor", "core", "worker"]
    stop_daemon(daemon.name)
    for process in info.processes:
        wait_for_end(process.pid)
    assert not find_named(daemon.name).exists()
    with pytest.raises(DaemonError, match="no daemon named 'paced' is running"):
        stop_daemon(daemon.name)


def test_a_start_that_fails_raises_the_cause_and_leaves_nothing() -> None:
    with pytest.raises(ModelError, match="model='missing': expected a folder"):
        start_daemon("bad", make_named_config("missing"))
    assert not find_named("bad").exists()


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(EngineStartError, match=r"the log .*logless\.log cannot be written: Not a directory"):
        start_daemon("logless", PACED)


def test_of_two_that_start_at_once_one_wins_and_the_other_names_it() -> None:
    starters = [DaemonStarter(SupervisorArgs(name="race", config=PACED)) for _ in range(3)]
    errors: list[str] = []
    winners: list[DaemonStarter] = []
    for starter in starters:
        try:
            starter.wait_until_ready()
            winners.append(starter)
        except DaemonError as error:
            errors.append(str(error))
    [winner] = winners
    assert errors == [f"a daemon named 'race' is running already (pid {winner.child.pid})"] * 2
    winner.stop()
    assert not find_named("race").exists()


def test_a_daemon_of_one_program_ends_with_it() -> None:
    starter = DaemonStarter(SupervisorArgs(name="mine", config=PACED, ends_with_parent=True))
    starter.wait_until_ready()
    starter.child.close_lifeline()
    wait_for_end(starter.child.pid)
    assert starter.child.stop(1.0) == 0
    assert not find_named("mine").exists()


def test_nothing_is_left_open_after_many_restarts(daemon: Daemon) -> None:
    def count_fds(pid: int) -> int:
        return psutil.Process(pid).num_fds()

    before = 0
    for number in range(5):
        restart_engine(daemon.name, TIMEOUT_S)
        assert daemon.num_restarts == number + 1
        before = before or count_fds(daemon.pid)
    assert count_fds(daemon.pid) == before
    core_before = count_fds(daemon.core_pid)
    for _ in range(20):
        attach_client(daemon.name, "test").close()
    assert wait_until(lambda: count_fds(daemon.core_pid) == core_before, 2.0)


def test_supervisor_and_core_take_the_hard_limit_on_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        with Daemon("many", PACED) as daemon:
            for pid in (daemon.pid, daemon.core_pid):
                assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_held_run_directory_is_not_a_daemon_to_attach_to() -> None:
    held = RunDirectory.create_named("held")
    try:
        with pytest.raises(DaemonError, match=f"is running already .pid {os.getpid()}."):
            start_daemon("held", PACED)
        assert inspect_daemon("held") is None
    finally:
        held.remove()
