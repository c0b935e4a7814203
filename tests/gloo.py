"""Ranks as those on GPUs, on CPUs: their tensors travel by torch's gloo, their layers are Python's.

`python -m gloo ROLE`: the real engine core and the real worker with such ranks, poisoned as poisoned.py does.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
from quire.ipc.spec.config import EngineConfig
from quire.kernels.group.device_group import DeviceGroup

_TIMEOUT = timedelta(minutes=10)  # the core, or pytest, ends it sooner


def make_gloo(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """A communicator among CPUs."""
    from torch.distributed import ProcessGroupGloo

    assert device.type == "cpu"
    return ProcessGroupGloo(store, rank, size, _TIMEOUT)


def make_group(path: str, rank: int, size: int, *, sums_in_order: bool = False) -> DeviceGroup:
    """Returns once all ranks have called it."""
    cpu = torch.device("cpu")
    group = DeviceGroup(path, rank, size, cpu, sums_in_order=sums_in_order, make_communicator=make_gloo)
    group.connect()
    return group


def join_group(path: str, rank: int, config: EngineConfig, device: torch.device) -> DeviceGroup:
    """In the place of a worker's own."""
    assert device.type == "cpu"
    return make_group(path, rank, config.parallel.num_ranks, sums_in_order=config.wants_exact)


def run_core() -> None:
    """The engine core, whose workers are this module too."""
    from quire.core.engine import engine_process
    from quire.core.workers import local_place

    local_place.WORKER_MODULE = "gloo"
    engine_process.main()


def run_worker() -> None:
    """The worker, watched."""
    from poisoned import poison_steps
    from quire.worker import worker, worker_process

    worker.join_group = join_group
    poison_steps()
    worker_process.main()


if __name__ == "__main__":
    if "engine-core" in sys.argv[1:]:
        run_core()
    else:
        run_worker()
