"""Whether Triton's kernels run on a device. Triton is loaded only for a device that would use it.

The files named *_triton.py load Triton when they are imported: import them only after asking here.
"""

from __future__ import annotations

import functools
import logging
import typing

import torch

from .triton_faults import explain, find_missing

_LOGGER = logging.getLogger(__name__)

# Tests add "cpu", where Triton's interpreter runs the kernels.
DEVICE_TYPES = frozenset({"cuda"})


def can_use_triton(device: torch.device) -> bool:
    """True if kernels can be compiled for this device and run on it. Why they cannot costs one log line."""
    return device.type in DEVICE_TYPES and find_fault(device.type) is None


@functools.cache
def find_fault(device_type: str) -> str | None:
    """Why the smallest kernel does not run on the present device, logged once; None if it does."""
    device = torch.device(device_type)
    fault = find_missing(device) or _try_kernel(device)
    if fault is not None:
        _LOGGER.warning("Triton's kernels are off, slower torch operations take their place: %s", fault)
    return fault


class CompileWatch:
    """Counts the kernels that Triton compiles in this process, or loads from its cache on disk.

    With `is_serving` a log line names each, since a step waits for it. There is one at a time.
    """

    def __init__(self) -> None:
        from triton import knobs

        self.count = 0
        self.is_serving = False
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *, fn: typing.Any, **_: typing.Any) -> None:
        self.count += 1
        if self.is_serving:
            _LOGGER.warning("a step has waited for the kernel %s to be compiled", fn.name)


def _try_kernel(device: torch.device) -> str | None:
    try:
        from ..program.gather_rows_triton import launch_gather_rows

        launch_gather_rows(torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device))
    except Exception as error:  # of a compiler, a driver, a linker: whatever it is, torch can do without
        return explain(error)
    return None
