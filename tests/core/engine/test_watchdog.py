"""What is alive and does not get on is noticed: a silent core by its owner, a worker by its core."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from blocking_client import make_client
from child_fakes import FakeProcess
from daemon_loads import ask
from daemons import Daemon, wait_for_end, wait_until
from fakes import make_config
from quire.core.workers.executor import ExecutorEvent, ProcessExecutor, WorkerLost
from quire.core.workers.local_place import LocalPlace
from quire.core.workers.worker_group import StepWatch
from quire.frontend.daemon import find_log
from quire.ipc.errors import ConfigError, EngineStartError
from quire.ipc.processes import liveness, process
from quire.ipc.processes.liveness import Deadline
from quire.ipc.processes.process import is_computing, is_stopped
from quire.ipc.protocol.codec import make_step_codec
from quire.ipc.protocol.sockets import connect_dealer
from quire.ipc.protocol.step import ModelRunnerOutput, StepFailed, WorkerFailed, WorkerProgress, WorkerReady
from quire.ipc.spec.config import EngineConfig

pytestmark = pytest.mark.usefixtures("runtime")

NUM_TOKENS = 60
NUM_REQUESTS = 20


def configure(fault_hooks: str = "", name: str = "fake", **changes: object) -> EngineConfig:
    config = make_config(max_model_len=512, block_size=64)
    model = msgspec.structs.replace(config.model, served_model_name=name)
    return msgspec.structs.replace(config, model=model, fault_hooks=fault_hooks, **changes)


def make_executor(
    config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> ProcessExecutor:
    return ProcessExecutor(config, LocalPlace(config, context, address))


# What a worker owes, with time as a number.


def answer(step_id: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(step_id, [], [])


def watch_steps(step_timeout_s: float) -> tuple[StepWatch, Deadline]:
    deadline = Deadline(FakeProcess())
    steps = StepWatch(step_timeout_s)
    steps.begin_start([deadline], 60.0, 100.0)
    return steps, deadline


def watch_ready(step_timeout_s: float) -> tuple[StepWatch, Deadline]:
    """Of a worker that is ready."""
    steps, deadline = watch_steps(step_timeout_s)
    steps.note(WorkerReady(1, "cpu", []), 100.0)
    return steps, deadline


def test_a_test_of_suspects_has_ten_times_of_what_steps_have_taken() -> None:
    steps, deadline = watch_ready(300.0)
    steps.add_step(1, 100.0, 10)
    steps.note(ModelRunnerOutput(1, [], []), 101.0)
    steps.add_step(2, 110.0, 20, is_test=True)
    assert deadline.due_at == pytest.approx(110.0 + 10 * (1.0 + 20 * 0.1))
    assert not steps.is_overdue(139.0)
    assert steps.is_overdue(140.0)
    steps.note(ModelRunnerOutput(2, [], []), 112.0)
    assert not steps.is_overdue(1000.0)
    steps.add_step(3, 120.0, 100_000, is_test=True)
    assert deadline.due_at == 420.0  # no longer than any step


def test_a_steps_time_runs_from_the_answer_before_it() -> None:
    steps, deadline = watch_ready(5.0)
    steps.add_step(1, 100.0)
    steps.add_step(2, 101.0)
    assert deadline.due_at == 105.0
    steps.note(answer(1), 104.0)
    assert deadline.due_at == 109.0
    assert deadline.find_overdue(108.0) is None
    assert deadline.find_overdue(109.0) == "step 2 took longer than step_timeout_s=5"
    steps.note(StepFailed(2, "late"), 110.0)
    assert deadline.due_at is None


def test_forgotten_steps_and_their_late_answers_owe_nothing() -> None:
    steps, deadline = watch_ready(5.0)
    steps.add_step(1, 100.0)
    steps.forget_steps()
    assert deadline.due_at is None
    steps.add_step(2, 103.0)
    steps.note(answer(1), 104.0)
    assert deadline.due_at == 108.0


def test_answers_put_off_the_look_and_an_idle_worker_is_not_looked_at() -> None:
    steps, deadline = watch_ready(300.0)
    assert deadline.next_check_at is None
    steps.add_step(1, 100.0)
    steps.add_step(2, 100.0)
    steps.note(answer(1), 100.4)
    assert deadline.next_check_at == 100.9
    steps.note(answer(2), 100.5)
    assert deadline.next_check_at is None


def test_a_start_has_a_deadline_until_the_worker_is_ready() -> None:
    steps, deadline = watch_steps(5.0)
    steps.note(WorkerProgress("load weights", 1.0), 101.0)
    assert deadline.due_at == 160.0
    assert deadline.find_overdue(160.0) == "it was not ready within 60 s"
    steps.begin_start([deadline], 60.0, 200.0)
    assert deadline.due_at == 260.0
    steps.note(WorkerReady(1, "cpu", []), 201.0)
    assert deadline.due_at is None


def test_zero_turns_every_watch_off() -> None:
    steps, deadline = watch_steps(0.0)
    steps.add_step(1, 100.0)
    assert deadline.due_at is None
    assert not configure(step_timeout_s=0.0).watches_core
    assert configure().watches_core


@pytest.mark.parametrize("value", [-1, 0.01, float("nan"), 1e9, True, "5"])
def test_a_time_out_that_cannot_be_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"step_timeout_s=.*seconds from 0\.1 to 86400, or 0"):
        configure(step_timeout_s=value).__post_init__()


# A worker during its start, before it loads torch.


def follow(
    executor: ProcessExecutor, until: Callable[[ExecutorEvent], bool], timeout_s: float
) -> ExecutorEvent:
    """The first event that is asked for; the poll is the core's."""
    poller = zmq.Poller()
    executor.register(poller)
    deadline = time.monotonic() + timeout_s
    while (now := time.monotonic()) < deadline:
        look_at = deadline if executor.next_check_at is None else min(deadline, executor.next_check_at)
        poller.poll(1 + max(0, int(1000 * (look_at - now))))
        for event in executor.receive():
            if until(event):
                return event
    raise AssertionError(f"not within {timeout_s:g} s")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_worker_that_hangs_in_its_start_is_lost_when_its_time_is_over(
    runtime: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    config = configure("worker.start:hang", ready_timeout_s=1.0)
    executor = make_executor(config, context, f"ipc://{runtime}/hang")
    executor.start()
    event = follow(executor, lambda event: isinstance(event, WorkerLost), 10.0)
    assert isinstance(event, WorkerLost)
    assert "SIGKILL: it was not ready within 1 s" in event.reason
    executor.stop(0.0)


def test_a_stopped_worker_is_lost_and_the_next_one_is_heard(
    runtime: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    executor = make_executor(configure("worker.start:hang"), context, f"ipc://{runtime}/stop")
    executor.start()
    follow(executor, lambda event: isinstance(event, WorkerProgress), 5.0)
    pid = executor.pids["worker"]
    os.kill(pid, signal.SIGSTOP)
    event = follow(executor, lambda event: isinstance(event, WorkerLost), 10.0)
    assert isinstance(event, WorkerLost)
    assert "it is stopped" in event.reason
    executor.start()
    follow(executor, lambda event: isinstance(event, WorkerProgress), 5.0)
    assert executor.pids["worker"] != pid
    executor.stop(0.0)


def test_a_worker_that_says_why_its_start_failed_writes_no_stacks_as_it_leaves(
    runtime: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    executor = make_executor(configure(), context, f"ipc://{runtime}/leave")
    executor.start()
    os.kill(executor.pids["worker"], signal.SIGSTOP)  # before it connects; this test speaks for it
    socket, connection = executor._place.sockets
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    worker = connect_dealer(context.socket(zmq.DEALER), endpoint, b"worker-0")
    worker.send_multipart(make_step_codec().encode(WorkerFailed("no such model", "ModelError")))
    follow(executor, lambda event: isinstance(event, WorkerFailed), 5.0)
    worker.close()
    assert connection.poll(5000)
    assert executor.receive() == []
    assert executor.next_check_at is None, "it is given up"
    executor.stop(0.0)


def test_a_worker_whose_connection_ends_is_lost_though_its_process_lives(
    runtime: Path, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "is_stopped", lambda _pid: False)
    executor = make_executor(configure("worker.start:hang"), context, f"ipc://{runtime}/cut")
    executor.start()
    os.kill(executor.pids["worker"], signal.SIGSTOP)  # before it connects; this test speaks for it
    endpoint = executor._place.sockets[0].getsockopt_string(zmq.LAST_ENDPOINT)
    worker = connect_dealer(context.socket(zmq.DEALER), endpoint, b"worker-0")
    worker.send_multipart(make_step_codec().encode(WorkerProgress("load weights", 1.0)))
    follow(executor, lambda event: isinstance(event, WorkerProgress), 5.0)
    worker.close()
    event = follow(executor, lambda event: isinstance(event, WorkerLost), 5.0)
    assert isinstance(event, WorkerLost)
    assert "SIGKILL: its connection has ended" in event.reason
    executor.stop(0.0)


def test_a_worker_of_an_earlier_core_does_not_reach_the_next_one(
    runtime: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    config, address = configure("worker.start:hang"), f"ipc://{runtime}/again"
    first = make_executor(config, context, address)
    first.start()
    endpoint = first._place.sockets[0].getsockopt_string(zmq.LAST_ENDPOINT)
    late = connect_dealer(context.socket(zmq.DEALER), endpoint, b"late worker")
    assert late.poll(5000, zmq.POLLOUT)
    first.stop(0.0)
    with zmq.Context() as another:  # as of another process
        second = make_executor(config, another, address)
        second.start()
        follow(second, lambda event: isinstance(event, WorkerProgress), 5.0)
        assert not late.poll(500, zmq.POLLOUT), "it has connected again"
        second.stop(0.0)
    late.close(linger=0)
    names = {path.name for path in runtime.glob("again*")}
    assert len(names) <= 1, "a core removes the files that the one before it has left"


# A core and its owner.


@pytest.mark.parametrize("action", ["raise", "segfault", "exit", "slow"])
def test_a_core_that_ends_in_a_step_costs_no_token(action: str) -> None:
    client = make_client(configure(f"core.schedule:{action}@20"))
    pid = client.facts.pids["core"]
    ask(client, "r", NUM_REQUESTS, NUM_TOKENS)
    assert (client.facts.pids["core"] == pid) == (action == "slow")
    client.close()


def test_a_core_that_hangs_is_killed_and_costs_no_token(
    capfd: pytest.CaptureFixture[str],
) -> None:
    client = make_client(configure("core.schedule:hang@20"))
    ask(client, "r", NUM_REQUESTS, NUM_TOKENS)
    client.close()
    assert "_submit_steps" in capfd.readouterr().err, "its stacks were not written"


def test_a_frame_that_does_not_decode_is_asked_for_again() -> None:
    client = make_client(configure("core.outputs_frame:corrupt@3,core.outputs_frame:corrupt@4"))
    pid = client.facts.pids["core"]
    ask(client, "r", NUM_REQUESTS, NUM_TOKENS)
    assert client.facts.pids["core"] == pid
    client.close()


def test_an_idle_client_replaces_a_core_that_was_killed_before_it_adds() -> None:
    client = make_client(configure())
    os.kill(client.facts.pids["core"], signal.SIGKILL)
    wait_for_end(client.facts.pids["core"])
    ask(client, "r", NUM_REQUESTS, NUM_TOKENS)
    client.close()


@pytest.mark.parametrize("phase", [1, 2])
def test_a_core_that_ends_in_its_first_start_is_an_error(phase: int) -> None:
    with pytest.raises(EngineStartError, match="exited with code 1"):
        make_client(configure(f"core.start:exit@{phase}"))


def test_a_core_that_hangs_before_it_listens_is_an_error_at_the_first_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "LISTEN_TIMEOUT_S", 0.5)
    with pytest.raises(EngineStartError, match=r"SIGKILL: it did not listen within 0\.5 s"):
        make_client(configure("core.bind:hang"))


def test_a_daemons_core_that_hangs_before_it_listens_is_replaced() -> None:
    with Daemon("paced", configure("core.bind:hang", name="paced")) as daemon:
        assert daemon.num_restarts == 1
        log = find_log("paced").read_text()
    assert "SIGKILL: it did not listen within 3 s" in log


def test_a_daemons_stopped_core_is_replaced_though_nobody_waits() -> None:
    with Daemon("paced", configure(name="paced")) as daemon:
        pid = daemon.core_pid
        os.kill(pid, signal.SIGSTOP)
        wait_for_end(pid, timeout_s=10.0)
        daemon.wait_until_ready(num_restarts=1)


@contextlib.contextmanager
def run_python(program: str) -> Iterator[int]:
    """The pid of a process that runs `program`."""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        yield process.pid
        process.kill()


def test_what_a_process_does_is_read_from_the_kernel() -> None:
    with run_python("import signal; signal.pause()") as pid:
        assert wait_until(lambda: is_computing(pid), 5.0), "it starts"
        assert wait_until(lambda: not is_computing(pid), 5.0)
        assert not is_stopped(pid)
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: is_stopped(pid), 5.0)
        assert not is_computing(pid)
    assert not is_computing(pid)
    assert not is_stopped(pid)


def test_a_thread_that_computes_makes_a_process_busy_though_its_main_thread_waits() -> None:
    program = """
import threading
def spin():
    while True: pass
thread = threading.Thread(target=spin)
thread.start()
thread.join()
"""
    with run_python(program) as pid:
        main_thread = Path(f"/proc/{pid}/stat")
        assert wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) == 2, 5.0)
        assert wait_until(lambda: ") S " in main_thread.read_text() and is_computing(pid), 5.0)
