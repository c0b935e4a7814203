"""Capturing computations as CUDA graphs, all of them at a worker's start.

A capture that fails leaves its stream, and torch's allocator, in a state that nothing brings them out of:
CaptureError, and the worker's process ends.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..ipc.errors import CaptureError

Replay = Callable[[], None]


class Capture(Protocol):
    """Captures a computation on fixed tensors: (a function that runs it again, its result)."""

    def __call__(self, compute: Callable[[], Tensor], /) -> tuple[Replay, Tensor]: ...


@contextmanager
def capture_on_cuda(device: torch.device) -> Generator[Capture]:
    """Gives a Capture for all graphs of a worker, which share one memory pool: they replay one by one.

    The device is waited for, and its free memory given back, once for all of them. A computation runs as it
    is before it is captured: what is compiled, loaded or allocated at a first call is there by then.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        try:
            compute()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = compute()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            # The end of a capture that has failed fails too; the first error is the reason.
            raise CaptureError(error.__context__ or error) from error
        return graph.replay, result

    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    was_enabled = gc.isenabled()
    gc.disable()  # what it frees of the device would be part of a capture
    try:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield capture
        torch.cuda.current_stream(device).wait_stream(stream)
    finally:
        if was_enabled:
            gc.enable()
