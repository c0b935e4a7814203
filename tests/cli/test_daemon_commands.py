"""`quire daemon`, `quire ps` and --attach as a person calls them: exit codes, texts and what is left behind.

Most run over fake cores; weights and memory need a real worker. What is not about the process that calls is
called in this one.
"""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from daemons import find_processes, runtime_folders, wait_for_end, wait_until
from forked import fork_children
from quire.frontend import daemon as frontend_daemon
from quire.frontend.cli.commands import daemon as daemon_commands
from quire.frontend.cli.entry import run_command
from quire.frontend.models.model_folder import pocket_folder
from quire.ipc.daemon.daemon_state import DaemonState, EngineState
from quire.ipc.daemon.run_dir import find_daemon, find_named, find_owner, list_daemons
from quire.ipc.errors import DaemonError
from quire.ipc.processes import process
from quire.ipc.processes.process import is_stopped
from refusals import Refusal, refusals, run_refused

REAL = [sys.executable, "-m", "quire"]
FAKE = [
    sys.executable,
    "-c",
    "import sys; from quire.frontend import daemon; daemon.CORE_MODULE = 'fake_core'\n"
    "from quire.frontend.cli.entry import run_command; sys.exit(run_command())",
]
PS_KEYS = [
    *("name", "model", "formats", "state", "uptime_s", "restarts", "clients", "num_running", "num_waiting"),
    *("kv_blocks_used", "kv_blocks_total", "tokens_per_s", "processes", "engines"),
]
ENGINE_KEYS = [
    *("index", "state", "restarts", "last_loss"),
    *PS_KEYS[6:-2],
    *("tensor_parallel_size", "pipeline_parallel_size"),
]


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[Path]:
    with runtime_folders() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def pid() -> Iterator[int]:
    """The supervisor of a daemon that is called 'one' and runs for the whole module."""
    done = quire("daemon", "start", "--name", "one", "--max-model-len", "256")
    assert done.returncode == 0, done.stderr
    yield find_daemon("one")
    assert quire("daemon", "stop", "one").returncode == 0


class Done(NamedTuple):
    """How a command has ended."""

    returncode: int
    stdout: str
    stderr: str


def quire(*arguments: str, core_module: str = "fake_core") -> Done:
    """Calls the command here."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend_daemon, "CORE_MODULE", core_module)
        patch.setattr(process, "subprocess", fork_children())
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        code = run_command(arguments)
    return Done(code, *(stream.buffer.getvalue().decode() for stream in (out, errors)))


def assert_nothing_is_left(runtime: Path, name: str) -> None:
    """No process beside those of 'one', no run directory."""
    assert not find_named(name).exists()
    known = {"one"} & set(list_daemons())
    assert wait_until(lambda: len(find_processes(str(runtime))) <= 2 * len(known), 3.0)


def test_start_says_the_name_the_model_the_pid_and_the_log(runtime: Path) -> None:
    done = quire("daemon", "start", "--max-model-len", "256")
    pid = find_daemon("default")
    assert done.returncode == 0
    assert done.stdout == f"default: pocket is ready (pid {pid}), log {runtime}/state/quire/default.log\n"
    assert done.stderr == ""
    done = quire("daemon", "stop")
    assert (done.returncode, done.stdout, done.stderr) == (0, "default: stopped\n", "")
    wait_for_end(pid)
    assert_nothing_is_left(runtime, "default")


def test_a_second_start_is_refused_with_the_pid_before_anything_loads(pid: int) -> None:
    done = quire("daemon", "start", "/no/such/folder", "--name", "one")  # nobody looks for the folder
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"quire: error: a daemon named 'one' is running already (pid {pid})\n"


def test_ps_json_has_exactly_the_documented_keys(pid: int) -> None:
    done = quire("ps", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    [daemon] = json.loads(done.stdout)
    assert list(daemon) == PS_KEYS
    assert (daemon["name"], daemon["model"], daemon["state"]) == ("one", "pocket", "ready")
    assert (daemon["restarts"], daemon["clients"], daemon["num_running"], daemon["num_waiting"]) == (
        0,
        0,
        0,
        0,
    )
    assert (daemon["kv_blocks_used"], daemon["kv_blocks_total"]) == (0, 256)
    assert 0.0 < daemon["uptime_s"] < 600.0
    assert [list(process) for process in daemon["processes"]] == [["role", "rank", "pid", "engine"]] * 3
    assert [list(engine) for engine in daemon["engines"]] == [ENGINE_KEYS]
    assert [p["role"] for p in daemon["processes"]] == ["supervisor", "core", "worker"]
    assert daemon["processes"][0]["pid"] == pid


def test_ps_answers_in_time_when_an_engine_does_not(pid: int) -> None:
    core_pid = json.loads(quire("ps", "--json").stdout)[0]["processes"][1]["pid"]
    for one in (pid, core_pid):  # of these the supervisor would replace the core after a while
        os.kill(one, signal.SIGSTOP)
    try:
        # A look has 1 s; an ordinary call would wait for 30.
        command = [*FAKE, "ps", "--json"]
        [daemon] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=20.0).stdout)
    finally:
        for one in (core_pid, pid):
            os.kill(one, signal.SIGCONT)
    assert list(daemon) == PS_KEYS
    assert (daemon["clients"], daemon["kv_blocks_total"]) == (None, None)
    assert [p["pid"] for p in daemon["processes"]] == [pid, core_pid]
    assert quire("ps").returncode == 0


def test_ps_prints_a_table_with_a_row_for_each_daemon(pid: int) -> None:
    header, row = quire("ps").stdout.splitlines()
    assert " ".join(header.split()) == (
        "NAME MODEL STATE UPTIME RESTARTS CLIENTS RUNNING WAITING KV TOK/S PIDS"
    )
    assert row.split()[:3] == ["one", "pocket", "ready"]
    assert str(pid) in row


def test_several_engines_are_listed_drained_added_and_removed() -> None:
    def call(*arguments: str) -> tuple[int, str]:
        done = quire(*arguments)
        return done.returncode, done.stdout or done.stderr

    code, _ = call("daemon", "start", "--name", "few", "--engines", "2", "--max-model-len", "256")
    assert code == 0
    for words, text in (
        ("drain few 1", "few: engine 1 is drained"),
        ("resume 1 --name few", "few: engine 1 takes requests"),
        ("add-engine few", "few: engine 2 is ready"),
        ("remove-engine few 1", "few: engine 1 is removed"),
        ("drain few 2", "few: engine 2 is drained"),
    ):
        assert call("daemon", *words.split()) == (0, f"{text}\n")
    rows = [row.split() for row in call("ps")[1].splitlines()]
    assert [row[:3] for row in rows if row[0] == "few"] == [["few", "pocket", "ready"]]
    assert [row[:2] for row in rows if "/" in row[0]] == [["few/0", "ready"], ["few/2", "drained"]]
    for words, expected, error in (
        ("drain few 1", 1, "there is no engine 1; there are 0, 2"),
        ("remove-engine few 0", 1, "engine 0 cannot be removed: no other takes requests"),
        ("drain few x", 2, "ENGINE='x': expected an integer"),
    ):
        assert call("daemon", *words.split()) == (expected, f"quire: error: {error}\n")
    assert call("daemon", "stop", "few") == (0, "few: stopped\n")


def test_a_removed_engines_address_is_named_with_those_that_are_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = [
        EngineState(index=0, socket="core.sock", state="ready"),
        EngineState(index=1, socket="core1.sock", state="lost"),
        EngineState(index=3, socket="core3.sock", state="ready"),
    ]
    state = DaemonState(
        name="far", model="m", pid=1, started_at=0.0, engines=engines, listen="tcp://[::1]:5757"
    )
    monkeypatch.setattr(daemon_commands, "remove_engine", lambda _name, _index: None)
    monkeypatch.setattr(daemon_commands, "read_state", lambda _directory: state)
    assert run_command(["daemon", "remove-engine", "far", "0"]) == 0
    assert capsys.readouterr().out == (
        "far: engine 0 is removed\n"
        "far: frontends of other machines come no longer to tcp://[::1]:5757, but to tcp://[::1]:5760\n"
    )


def test_restart_makes_a_new_core_under_the_same_supervisor(pid: int) -> None:
    before = json.loads(quire("ps", "--json").stdout)[0]
    done = quire("daemon", "restart", "--name", "one")
    assert (done.returncode, done.stdout) == (0, "one: ready again\n")
    after = json.loads(quire("ps", "--json").stdout)[0]
    assert after["restarts"] == before["restarts"] + 1
    assert after["processes"][0]["pid"] == pid
    assert after["processes"][1]["pid"] != before["processes"][1]["pid"]


@pytest.mark.usefixtures("pid")
@refusals("daemon_commands")
def test_bad_calls_are_one_line_with_an_exit_code(
    refusal: Refusal, capsys: pytest.CaptureFixture[str], runtime: Path
) -> None:
    refusal.check(lambda arguments: run_refused(arguments, capsys), runtime)


@pytest.mark.usefixtures("pid")
def test_logs_are_there_while_it_runs_and_when_it_has_ended() -> None:
    assert quire("daemon", "start", "--name", "log", "--max-model-len", "256").returncode == 0
    running = quire("daemon", "logs", "log", "-n", "2")
    assert running.returncode == 0
    assert 1 <= len(running.stdout.splitlines()) <= 2
    assert quire("daemon", "stop", "log").returncode == 0
    assert running.stdout.splitlines()[-1] in quire("daemon", "logs", "log").stdout


def test_generate_attached_runs_on_the_daemons_engine_and_leaves_it(pid: int) -> None:
    done = quire("generate", "--attach", "one", "--max-tokens", "3", "--json", "Once upon a time")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] <= 3
    assert find_daemon("one") == pid


# Starts that fail.


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """The pocket model with its weights cut off."""
    folder = tmp_path / "broken"
    shutil.copytree(pocket_folder(), folder)
    weights = next(folder.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    return folder


def test_truncated_weights_are_named_and_leave_nothing(runtime: Path, broken_model: Path) -> None:
    done = quire("daemon", "start", str(broken_model), "--name", "cut", core_module="quire.core")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "safetensors" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert_nothing_is_left(runtime, "cut")


def test_too_small_a_cache_is_named_and_leaves_nothing(runtime: Path) -> None:
    done = quire(
        "daemon", "start", "--name", "small", "--kv-cache-memory-bytes", "20KiB", core_module="quire.core"
    )
    assert done.returncode == 2, done.stderr
    assert "kv_cache_memory_bytes" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert_nothing_is_left(runtime, "small")


@pytest.mark.parametrize(
    "program", [REAL, FAKE], ids=["while a worker loads", "when it is about to be ready"]
)
def test_ctrl_c_while_it_starts_leaves_nothing(runtime: Path, program: list[str]) -> None:
    start = subprocess.Popen(
        [*program, "daemon", "start", "--name", "interrupted", "--max-model-len", "256"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert wait_until(lambda: find_owner(find_named("interrupted")), 20.0)
    start.send_signal(signal.SIGINT)
    out, errors = start.communicate(timeout=20)
    assert (start.returncode, out) == (130, "")
    assert "Traceback" not in errors
    with pytest.raises(DaemonError):
        find_daemon("interrupted")
    assert_nothing_is_left(runtime, "interrupted")


# What else happens to one.


@pytest.fixture
def own_pid() -> Iterator[int]:
    """The supervisor of a daemon that is called 'own' and is started for a test that may end it."""
    assert quire("daemon", "start", "--name", "own", "--max-model-len", "256").returncode == 0
    pid = find_daemon("own")
    yield pid
    if find_owner(find_named("own")) is not None:
        os.kill(pid, signal.SIGCONT)
        assert quire("daemon", "stop", "own").returncode == 0


def test_a_stopped_daemon_serves_says_why_it_cannot_be_restarted_and_can_be_ended(
    own_pid: int, runtime: Path
) -> None:
    os.kill(own_pid, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(own_pid), 5.0)
    assert "own" in [line.split()[0] for line in quire("ps").stdout.splitlines()]
    assert quire("generate", "--attach", "own", "--max-tokens", "3", "One day").returncode == 0
    done = quire("daemon", "restart", "own")
    said = f"a signal has stopped the daemon 'own' (pid {own_pid}), `kill -CONT {own_pid}` continues it"
    assert (done.returncode, done.stderr) == (1, f"quire: error: {said}\n")
    assert quire("daemon", "stop", "own").returncode == 0
    assert_nothing_is_left(runtime, "own")  # it ended by itself, once it was continued


def test_a_start_that_is_stopped_says_so(runtime: Path) -> None:
    command = [*FAKE, "daemon", "start", "--name", "brief", "--served-model-name", "unready"]
    starting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert wait_until(lambda: find_owner(find_named("brief")) is not None, 20.0)
    assert quire("daemon", "stop", "brief").returncode == 0
    assert starting.communicate(timeout=20)[1] == "quire: error: the daemon was stopped before it was ready\n"
    assert starting.returncode == 1
    assert_nothing_is_left(runtime, "brief")


def test_a_daemon_whose_directory_has_just_been_deleted_can_be_restarted(own_pid: int) -> None:
    shutil.rmtree(find_named("own"))
    assert quire("daemon", "restart", "own").returncode == 0
    assert find_daemon("own") == own_pid


# What a daemon outlives.


def stop_and_check(name: str, pid: int) -> None:
    assert find_daemon(name) == pid
    [daemon] = [one for one in json.loads(quire("ps", "--json").stdout) if one["name"] == name]
    assert (daemon["state"], daemon["restarts"], daemon["processes"][0]["pid"]) == ("ready", 0, pid)
    assert quire("daemon", "stop", name).returncode == 0
    wait_for_end(pid)
    assert not find_named(name).exists()


def test_a_daemon_outlives_the_script_that_started_it() -> None:
    script = 'set -m; "$@" daemon start --name kept --max-model-len 256 > /dev/null; kill -9 $$'
    done = subprocess.run(["bash", "-c", script, "bash", *FAKE], timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    stop_and_check("kept", find_daemon("kept"))


def test_a_daemon_can_be_started_by_who_has_closed_its_standard_streams() -> None:
    script = 'exec "$@" daemon start --name mute --max-model-len 256 <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", script, "bash", *FAKE], timeout=60).returncode == 0
    stop_and_check("mute", find_daemon("mute"))


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")  # the child execs
def test_a_daemon_survives_the_hangup_of_its_terminal() -> None:
    pid, fd = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a run under nohup begins with it ignored
        os.execv("/bin/sh", ["sh", "-c", '"$@"; echo started; sleep 1000', "sh", *FAKE, "daemon", "start",
                             "--name", "tty", "--max-model-len", "256"])  # fmt: skip
    shown = ""
    while "started" not in shown:
        shown += os.read(fd, 65536).decode()
    assert "daemon 'tty': starting ..." in shown  # for who watches
    assert "tty: pocket is ready" in shown
    os.close(fd)  # the terminal is gone: its session gets SIGHUP
    os.waitpid(pid, 0)
    stop_and_check("tty", find_daemon("tty"))
