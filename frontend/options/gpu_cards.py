"""What a GPU is, asked of its driver, and the defaults that follow: a frontend never loads torch.

On a machine without NVIDIA's driver this costs the look for one file. Where the driver does not answer, or a
torch for CPUs is installed, the defaults are a CPU's.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_DRIVER = Path("/dev/nvidiactl")
_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_LARGE_BYTES = 70 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as its driver describes it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """How large steps are where the user does not say."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def choose_step_defaults(device: str) -> StepDefaults:
    """vLLM's of a server: larger ones for a GPU of 70 GiB or more that is no A100."""
    card = None if device == "cpu" else find_card(device)
    if card is None or card.memory_bytes < _LARGE_BYTES or "a100" in card.name.lower():
        return StepDefaults()
    return StepDefaults(max_num_batched_tokens=8192, max_num_seqs=1024)


def find_card(device: str = "auto") -> Card | None:
    """The GPU that an engine of this `device` would take first; None if there is none to be had."""
    if not _DRIVER.exists() or _is_for_cpus():
        return None
    suffix = str(device).partition(":")[2]
    number = int(suffix) if suffix.isdigit() else 0  # what is no device is refused elsewhere
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _ask_driver(str(number))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return _ask_driver(names[number]) if number < len(names) else None


def _is_for_cpus() -> bool:
    """Whether the installed torch, if any, computes on CPUs only."""
    from importlib import metadata  # 16 ms, which who has no GPU does not pay

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True


def _ask_driver(name: str) -> Card | None:
    """The card by its number, or its UUID as CUDA_VISIBLE_DEVICES may have it."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        return _describe(nvml, name)
    finally:
        nvml.nvmlShutdown()


def _describe(nvml: ctypes.CDLL, name: str) -> Card | None:
    handle, memory, text = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(_NAME_BYTES)
    if name.isdigit():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    failed = failed or nvml.nvmlDeviceGetName(handle, text, ctypes.c_uint(_NAME_BYTES))
    return None if failed else Card(text.value.decode(errors="replace"), memory.total)
