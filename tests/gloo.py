"""Ranks as those on GPUs, on CPUs: their tensors travel by torch's gloo, their layers are Python's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from quire.kernels.device_group import DeviceGroup

_TIMEOUT = timedelta(seconds=60)


def connect_gloo(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """A communicator among CPUs."""
    from torch.distributed import ProcessGroupGloo

    assert device.type == "cpu"
    return ProcessGroupGloo(store, rank, size, _TIMEOUT)


def make_group(path: str, rank: int, size: int, *, sums_in_order: bool = False) -> DeviceGroup:
    """Returns once all ranks have called it."""
    cpu = torch.device("cpu")
    return DeviceGroup(path, rank, size, cpu, sums_in_order=sums_in_order, connect=connect_gloo)
