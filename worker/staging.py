"""Moves between host arrays and the device: the whole difference between a CPU and a CUDA worker's data path.

On the CPU both directions are views. On CUDA they are asynchronous copies through pinned memory; torch's
pinned allocator keeps a buffer until the copies that use it are done, so nothing here is reused too early.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device. On the CPU it shares memory: the caller must not write to it afterwards."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Device tensors on their way to the host, started together and waited for once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            self._tensors = tensors
            return
        self._tensors = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(self._tensors, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they are all there. May be called again."""
        if self._event is not None:
            self._event.synchronize()
        return [np.asarray(tensor.numpy()) for tensor in self._tensors]
