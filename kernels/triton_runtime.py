"""Whether Triton's kernels run on a device. Triton is loaded only for a device that would use it.

The files named *_triton.py load Triton when they are imported: import them only after asking here.
"""

from __future__ import annotations

import functools
import logging
import subprocess

import torch

_LOGGER = logging.getLogger(__name__)

# Tests add "cpu", where Triton's interpreter runs the kernels.
DEVICE_TYPES = frozenset({"cuda"})


def can_use_triton(device: torch.device) -> bool:
    """True if kernels can be compiled for this device and run on it. Why they cannot costs one log line."""
    return device.type in DEVICE_TYPES and find_fault(device.type) is None


@functools.cache
def find_fault(device_type: str) -> str | None:
    """Why the smallest kernel does not run, logged once; None if it does. Triton needs a C compiler."""
    try:
        from .gather_rows_triton import launch_gather_rows

        device = torch.device(device_type)
        launch_gather_rows(torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        fault = " ".join(str(error).split())[:300] or type(error).__name__
        _LOGGER.warning("Triton's kernels are off, torch operations take their place: %s", fault)
        return fault
    return None
