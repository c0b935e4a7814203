"""Ranks that Ray has placed: they come to the core over TCP with its keys, and are lost and replaced as one.

What of Ray is used is played by tests/fake_ray; e2e/test_ray.py has a real one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import has_dualstack_ipv6

import psutil
import pytest
import zmq
from daemons import fake_modules, runtime_folders, wait_for_end
from quire.core.network.ray import ray_place
from quire.core.network.ray.ray_place import RayPlace
from quire.ipc.network.keys import make_key_pairs
from quire.ipc.protocol.codec import make_step_codec
from quire.ipc.protocol.sockets import connect_dealer
from quire.ipc.protocol.step import ModelRunnerOutput, WorkerFailed, WorkerProgress, WorkerReady
from rank_driver import Ranks, make_rank_config

SIZE = 2


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[None]:
    folder = Path(__file__).parents[3] / "fake_ray"
    with runtime_folders(), fake_modules(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_place, "WORKER_MODULE", "fake_rank")
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    """Starts ranks; they are stopped at the end."""
    started: list[Ranks] = []

    def start(**changes: object) -> Ranks:
        config = make_rank_config(SIZE, backend="ray", **changes)
        started.append(Ranks(config, RayPlace(config)))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()


def find_ranks(launcher: int) -> list[int]:
    return [one.pid for one in psutil.Process(launcher).children() if one.cmdline()[-1].startswith("worker-")]


def check_computes(ranks: Ranks) -> None:
    ranks.step(7)
    assert ranks.follow(ModelRunnerOutput) == ModelRunnerOutput(7, [0, 1], [0, 0])


def test_ranks_elsewhere_compute_and_go_with_the_process_that_stands_for_them(
    start: Callable[..., Ranks],
) -> None:
    ranks = start()
    ready = ranks.follow(WorkerReady)
    assert isinstance(ready, WorkerReady)
    assert ready.num_gpu_blocks == 99, "as many as the least that a rank has"
    phases = [event.phase for event in ranks.seen if isinstance(event, WorkerProgress)]
    assert phases[:2] == ["import ray", f"wait for a Ray node with CPU {SIZE}"]
    check_computes(ranks)
    launcher = ranks.executor.pids["worker"]
    pids = find_ranks(launcher)
    assert len(pids) == SIZE
    os.kill(launcher, signal.SIGKILL)
    assert ranks.lose() == f"worker (pid {launcher}) was killed by SIGKILL"
    for pid in pids:
        wait_for_end(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_is_the_end_of_all_and_others_take_their_places(
    start: Callable[..., Ranks], number: signal.Signals
) -> None:
    ranks = start()
    ranks.follow(WorkerReady)
    launcher = ranks.executor.pids["worker"]
    pids = find_ranks(launcher)
    os.kill(pids[1], number)
    assert ranks.lose() == f"worker (pid {launcher}) was killed by SIGKILL"
    for pid in pids:
        wait_for_end(pid)
    ranks.executor.start()
    ranks.follow(WorkerReady)
    check_computes(ranks)


NO_IPV6 = pytest.mark.skipif(not has_dualstack_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=NO_IPV6)])
def test_who_has_other_keys_is_not_heard(start: Callable[..., Ranks], host: str) -> None:
    ranks = start(fault_hooks="worker.start:hang")
    ranks.follow(WorkerProgress)
    place = ranks.executor._place
    assert isinstance(place, RayPlace)
    assert place._keys is not None
    _, stranger = make_key_pairs()
    with zmq.Context() as context:
        for keys in (stranger, place._keys):
            known = type(keys)(keys.public, keys.secret, place._keys.server)
            socket = connect_dealer(
                context.socket(zmq.DEALER), f"tcp://{host}:{place._port}", b"worker-0", keys=known
            )
            is_known = keys is place._keys
            assert bool(socket.poll(5000 if is_known else 200, zmq.POLLOUT)) == is_known
            if is_known:
                socket.send_multipart(make_step_codec().encode(WorkerFailed("heard", "ModelError")))
                failed = ranks.follow(WorkerFailed)
                assert isinstance(failed, WorkerFailed)
                assert failed.reason == "heard"
            socket.close(linger=0)


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (
            "alone",
            "ConfigError",
            r"distributed_executor_backend='ray': expected a Ray cluster that this machine",
        ),
        ("small", "EngineStartError", r"no Ray node had CPU 2 within 30 s; 127.0.0.1 has CPU 0; free in all"),
        ("lost", "EngineStartError", r"no worker could start on a Ray node: The actor died"),
    ],
)
def test_what_ray_lacks_is_said_in_one_line(
    start: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, fault: str, kind: str, text: str
) -> None:
    monkeypatch.setenv("FAKE_RAY", fault)
    failed = start().follow(WorkerFailed)
    assert isinstance(failed, WorkerFailed)
    assert failed.kind == kind
    assert failed.reason.startswith(text)
    assert "\n" not in failed.reason
