"""`quire bench all-reduce`: sums over ranks beside gloo, and what a step costs to send to all.

Every rank is a process of its own, on cores of its own where there are enough.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from ...ipc.protocol.codec import make_step_codec
from ...ipc.protocol.sockets import bind_router, connect_dealer, make_ipc_address, send_to
from ...ipc.protocol.step import SchedulerOutput
from .machine import describe_machine, format_machine
from .table import format_table

SIZES = (
    2 << 10,
    32 << 10,
    256 << 10,
    1 << 20,
)  # bytes; bfloat16 rows of 1024 numbers: of 1, 16, 128, 512 tokens
_NUM_STEPS = 2000
_STEP_ROWS = 32
_TIMEOUT_S = 300.0


class RankRequest(msgspec.Struct, frozen=True):
    """What a rank's process is to do; `store` is the file through which gloo's ranks meet."""

    rank: int
    size: int
    path: str
    store: str
    seconds: float


class SizeTimes(msgspec.Struct, frozen=True):
    """Of one size, in us: the median of rounds and the best one, of each way."""

    size_bytes: int
    shared: tuple[float, float]
    gloo: tuple[float, float]


def run_all_reduce(size: int, seconds: float) -> int:
    """Measure and print; returns 0."""
    print(format_machine(describe_machine()) + "\n")
    rows = [
        [
            f"{times.size_bytes >> 10} KB",
            *(f"{value:.1f}" for value in (*times.shared, *times.gloo)),
            f"{times.gloo[0] / times.shared[0]:.1f}x",
        ]
        for times in measure_ranks(size, seconds)
    ]
    header = [f"{size} ranks, bfloat16, us", "shared", "best", "gloo", "best", "gloo / shared"]
    print(format_table(header, rows))
    print("\nmedian and best of rounds, as rank 0 sees them\n")
    alone_us, group_us = measure_broadcast(1), measure_broadcast(4)
    print(f"a step's frame to 1 worker {alone_us:.1f} us, to 4 ranks {group_us:.1f} us, of the core's time")
    return 0


def measure_ranks(size: int, seconds: float) -> list[SizeTimes]:
    """Start the ranks and wait for what rank 0 says. Raises CalledProcessError."""
    fd = os.memfd_create("bench-group")
    with tempfile.TemporaryDirectory() as folder:
        requests = [
            RankRequest(rank, size, f"/proc/self/fd/{fd}", str(Path(folder, "store")), seconds)
            for rank in range(size)
        ]
        ranks = [_start_rank(request, fd) for request in requests]
        os.close(fd)
        try:
            said, _ = ranks[0].communicate(timeout=_TIMEOUT_S)
        finally:
            for one in ranks:
                one.kill()
                one.wait()
    if ranks[0].returncode > 0:
        raise subprocess.CalledProcessError(ranks[0].returncode, ["bench", "all-reduce", "rank 0"])
    return msgspec.json.decode(said, type=list[SizeTimes])


def _start_rank(request: RankRequest, fd: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "quire.tools.bench.all_reduce_rank"]
    command.append(msgspec.json.encode(request).decode())
    stdout = subprocess.PIPE if request.rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, stdout=stdout, pass_fds=(fd,))


def measure_broadcast(size: int) -> float:
    """Median us that a decode step's encoding and sending takes; its receivers are in this process."""
    step = SchedulerOutput(1, list(range(_STEP_ROWS)), [1] * _STEP_ROWS)
    codec = make_step_codec()
    with tempfile.TemporaryDirectory(prefix="q") as folder, zmq.Context() as context:
        address = make_ipc_address(str(Path(folder, "ranks.sock")))
        router = bind_router(context, address)
        names = [b"worker-%d" % rank for rank in range(size)]
        ranks = [connect_dealer(context.socket(zmq.DEALER), address, name) for name in names]
        for rank in ranks:
            rank.send(b"")
        for _ in ranks:
            router.recv_multipart()
        times: list[float] = []
        for _ in range(_NUM_STEPS):
            started = time.perf_counter()
            frames = codec.encode(step)
            for name in names:
                send_to(router, name, frames)
            times.append(time.perf_counter() - started)
            for rank in ranks:
                rank.recv()
        context.destroy(linger=0)
    return statistics.median(times) * 1e6
