"""A rank of `quire bench all-reduce`: `python -m quire.tools.bench.all_reduce_rank REQUEST_JSON`."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed
from torch import Tensor

from ...ipc.processes.cpu_cores import divide_cores, list_cores
from ...kernels.group.shared_group import SPIN_US, SharedGroup
from ...kernels.program import native
from ...worker.rank import take_cores
from .all_reduce import SIZES, RankRequest, SizeTimes

_CALLS = 20  # in a round, timed together
_MIN_ROUNDS, _MAX_ROUNDS = 20, 2000


def measure(request: RankRequest) -> list[SizeTimes]:
    """Rounds of both ways in turn, as many of each size in every rank."""
    spin_us = 0 if divide_cores(list_cores(), request.size) is None else SPIN_US
    group = SharedGroup(request.path, request.rank, request.size, spin_us=spin_us)
    native.set_num_threads(take_cores(request.rank, request.size))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{request.store}", rank=request.rank, world_size=request.size
    )
    ways = (group.all_reduce, torch.distributed.all_reduce)
    times = [_measure_size(size_bytes, ways, group, request.seconds) for size_bytes in SIZES]
    torch.distributed.destroy_process_group()
    return times


def _measure_size(
    size_bytes: int, ways: tuple[Callable[[Tensor], object], ...], group: SharedGroup, seconds: float
) -> SizeTimes:
    x = torch.zeros(size_bytes // 2, dtype=torch.bfloat16)
    first_s = sum(_time_round(way, x) for way in ways)
    num_rounds = torch.tensor([max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(seconds / first_s)))])
    group.broadcast(num_rounds)
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(int(num_rounds)):
        for way, own in zip(ways, times, strict=True):
            own.append(_time_round(way, x) / _CALLS * 1e6)
    shared, gloo = ((statistics.median(own), min(own)) for own in times)
    return SizeTimes(size_bytes, shared, gloo)


def _time_round(way: Callable[[Tensor], object], x: Tensor) -> float:
    started = time.perf_counter()
    for _ in range(_CALLS):
        way(x)
    return time.perf_counter() - started


if __name__ == "__main__":
    request = msgspec.json.decode(sys.argv[1], type=RankRequest)
    times = measure(request)
    if request.rank == 0:
        print(msgspec.json.encode(times).decode())
