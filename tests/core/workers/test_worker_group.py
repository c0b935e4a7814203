"""The ranks of a worker start, answer and end as one, whatever happens to which of them."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from daemons import fake_modules, runtime_folders, wait_for_end
from quire.core.workers import local_place
from quire.core.workers.worker_group import find_late_rank, join_ready
from quire.ipc.protocol.step import (
    ModelRunnerOutput,
    WorkerFailed,
    WorkerProgress,
    WorkerReady,
)
from rank_driver import Ranks, make_rank_config

SIZE = 3


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[Path]:
    with runtime_folders() as folder, fake_modules(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_place, "WORKER_MODULE", "fake_rank")
        yield folder


@pytest.fixture
def start(runtime: Path) -> Iterator[Callable[..., Ranks]]:
    """Starts ranks with a configuration; they are stopped at the end."""
    started: list[Ranks] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def start(**changes: object) -> Ranks:
        config = make_rank_config(SIZE, **changes)
        started.append(Ranks(config, local_place.LocalPlace(config, context, f"ipc://{runtime}/ranks")))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()
    context.destroy(linger=0)


def test_all_ranks_must_be_ready_and_compute_but_only_rank_0_is_heard(start: Callable[..., Ranks]) -> None:
    ranks = start()
    ready = ranks.follow(WorkerReady)
    assert isinstance(ready, WorkerReady)
    assert ready.num_gpu_blocks == 100 - (SIZE - 1), "as many as the least that a rank has"
    assert ready.ledger == [("weights", 10 * SIZE)]
    assert [event.phase for event in ranks.seen if isinstance(event, WorkerProgress)] == ["start rank 0"]
    assert list(ranks.executor.pids) == ["worker-0", "worker-1", "worker-2"]
    for step_id in range(3):
        ranks.step(step_id)
    for step_id in range(3):  # rank 0 waits for the others: who is answered has been computed by all
        assert ranks.follow(ModelRunnerOutput) == ModelRunnerOutput(step_id, [0, 1], [0, 0])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_rank_is_the_end_of_all_and_others_take_their_places(
    runtime: Path, start: Callable[..., Ranks], rank: int
) -> None:
    ranks = start()
    ranks.follow(WorkerReady)
    pids = ranks.executor.pids
    os.kill(pids[f"worker-{rank}"], signal.SIGKILL)
    assert ranks.lose() == f"worker-{rank} (pid {pids[f'worker-{rank}']}) was killed by SIGKILL"
    for pid in pids.values():
        wait_for_end(pid, 0.0)
    ranks.executor.start()
    ranks.follow(WorkerReady)
    ranks.step(7)
    assert ranks.follow(ModelRunnerOutput) == ModelRunnerOutput(7, [0, 1], [0, 0])
    assert len(list(runtime.glob("ranks*"))) == 1, "the first ones' socket has left no file"


def test_a_stopped_rank_is_named_though_rank_0_owes_the_answer(start: Callable[..., Ranks]) -> None:
    ranks = start()
    ranks.follow(WorkerReady)
    os.kill(ranks.executor.pids["worker-2"], signal.SIGSTOP)
    ranks.step(1)
    reason = ranks.lose()
    assert reason.startswith("worker-2 ")
    assert reason.endswith("SIGKILL: it is stopped")


def test_the_rank_that_hangs_in_a_step_is_named(start: Callable[..., Ranks]) -> None:
    ranks = start(fault_hooks="worker.execute#1:hang@2", step_timeout_s=0.8)
    ranks.follow(WorkerReady)
    ranks.step(1)
    ranks.step(2)
    reason = ranks.lose()
    assert "step 2 took longer than step_timeout_s=0.8" in reason
    is_first_to_end = reason.startswith("worker-1 ")
    assert is_first_to_end or reason.endswith("; rank 1 was behind the others")


@pytest.mark.parametrize(
    ("stamps", "num_stages", "late"),
    [
        ([(9, 0), (8, 0), (9, 0)], 1, 1),
        ([(8, 0), (8, 0), (9, 0)], 1, None),  # who waits for whom cannot be told
        ([(0, 4), (0, 3), (0, 3)], 3, 1),  # the last stage waits for the second
        ([(0, 3), (0, 3), (0, 3)], 3, 0),
        ([(0, 0), (0, 0), (0, 0)], 3, None),  # none has begun
        ([(9, 4), (9, 4), (7, 3), (6, 3)], 2, 3),
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(
    stamps: list[tuple[int, int]], num_stages: int, late: int | None
) -> None:
    raw = [struct.pack("<III", stamp, 0, num_steps) for stamp, num_steps in stamps]
    assert find_late_rank(raw, len(stamps) // num_stages) == late


def test_a_rank_that_ends_in_its_start_is_the_end_of_the_start(start: Callable[..., Ranks]) -> None:
    ranks = start(fault_hooks="worker.start#2:exit")
    assert ranks.lose().startswith("worker-2 ")
    assert not any(isinstance(event, WorkerReady) for event in ranks.seen)


def test_ranks_that_have_loaded_other_weights_are_refused_by_name(start: Callable[..., Ranks]) -> None:
    failed = start(name="odd").follow(WorkerFailed)
    assert isinstance(failed, WorkerFailed)
    assert failed.kind == "ModelError"
    assert failed.reason.startswith("rank 1 sees other weights or another configuration than rank 0")
    assert "weights-1, not weights-0" in failed.reason


def test_what_a_stage_has_no_layer_for_is_what_the_others_have() -> None:
    """Stages of which one has no layer with KV and one none with recurrent states."""
    first = WorkerReady(0, "cpu", [("weights", 2), ("states", 3)], num_state_slots=9)
    second = WorkerReady(70, "cpu", [("weights", 5), ("KV cache", 7)])
    third = WorkerReady(60, "cpu", [("weights", 1), ("KV cache", 7), ("states", 1)], num_state_slots=8)
    ready = join_ready({0: first, 1: second, 2: third})
    assert isinstance(ready, WorkerReady)
    assert (ready.num_gpu_blocks, ready.num_state_slots) == (60, 8)
    assert ready.ledger == [("weights", 8), ("states", 4), ("KV cache", 14)]
