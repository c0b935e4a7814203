"""Moves between host arrays and the device: the whole difference between a CPU and a CUDA worker's data path.

On the CPU both directions are views. On CUDA they are asynchronous copies through pinned memory; torch's
pinned allocator keeps a buffer until the copies that use it are done, so nothing here is reused too early.

The host waits for the device in these places only: `HostCopies.wait`, when a step is collected, or before
sampling if a row's penalties or bad words need the tokens of the step ahead; the capture of graphs, once at
the start; and the first request of pinned memory of a size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 256  # bytes: where each tensor of a shared copy begins, as an allocation of its own would
_TYPES: dict[type, torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
    np.float64: torch.float64,
}


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device. On the CPU it shares memory: the caller must not write to it afterwards."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, which travel as one copy; as `to_device` otherwise."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
    starts = [0, *ends[:-1]]
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    room = staged.numpy()
    for start, array in zip(starts, arrays, strict=True):
        room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    sent = staged.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_TYPES[array.dtype.type]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


class StagingRing:
    """Pinned buffers of one size that take turns, for what goes to the same device tensor in every step.

    `take` gives the next one to fill and `send` starts its copy. With more buffers than steps in flight no
    call waits.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device, num_buffers: int) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(num_elements, dtype=dtype, pin_memory=is_cuda) for _ in range(num_buffers)
        ]
        self._sent: list[torch.cuda.Event | None] = [
            torch.cuda.Event() if is_cuda else None for _ in range(num_buffers)
        ]
        self._index = 0

    def take(self, *shape: int) -> NDArray[Any]:
        """An array of this shape in the next buffer, holding whatever it held."""
        self._index = (self._index + 1) % len(self._buffers)
        sent = self._sent[self._index]
        if sent is not None:
            sent.synchronize()
        return self._view(shape).numpy()

    def send(self, target: Tensor) -> None:
        """Copy the array that was taken last to `target`, of the same shape."""
        target.copy_(self._view(tuple(target.shape)), non_blocking=True)
        sent = self._sent[self._index]
        if sent is not None:
            sent.record()

    def _view(self, shape: tuple[int, ...]) -> Tensor:
        return self._buffers[self._index][: int(np.prod(shape))].view(shape)


class HostCopies:
    """Device tensors on their way to the host, started together and waited for once.

    They travel on a stream of their own, so that the next step need not wait for the copies.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            self._tensors = tensors
            return
        self._tensors = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        self._event = torch.cuda.Event()
        stream = _copy_stream(tensors[0].device)
        stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(stream):
            for copy, tensor in zip(self._tensors, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # its memory is not given to others before
            self._event.record(stream)

    @property
    def are_there(self) -> bool:
        """Whether `wait` would return at once. Raises what the device has failed with."""
        return self._event is None or self._event.query()

    def wait(self) -> list[NDArray[Any]]:
        """The arrays, once they are all there. May be called again."""
        if self._event is not None:
            self._event.synchronize()
        return [np.asarray(tensor.numpy()) for tensor in self._tensors]


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
