"""Which device a worker takes, why a GPU cannot be used, and which errors of a device end its process."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import torch

from ..ipc.errors import ConfigError
from ..kernels.group.shared_group import GroupAborted

_log = logging.getLogger(__name__)

_DRIVER = Path("/dev/nvidiactl")  # is there as soon as NVIDIA's driver has been loaded


def resolve_device(name: str, number: int = 0) -> torch.device:
    """The device that `parallel.device` names; "auto" takes a GPU if there is one. Raises ConfigError.

    Several workers (ranks, or several engines) take one visible GPU after another, beginning with the named
    one; `number` is this worker's.
    """
    if name == "cpu":
        return torch.device("cpu")
    fault = find_gpu_fault()
    if fault is not None or not torch.cuda.is_available():
        if name != "auto":
            raise ConfigError("device", name, f"cpu or auto: {fault or 'torch finds no CUDA device here'}")
        if fault is not None:
            _log.warning("models run on the CPU, though there is a GPU: %s", fault)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ":" in name:
        index = int(name.partition(":")[2]) + number
        if index >= count:
            raise ConfigError("device", name, _describe_choice(count, index))
    else:
        index = number % count
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def find_gpu_fault() -> str | None:
    """Why torch cannot use this machine's GPU; None if it can, or if there is none, or it is hidden."""
    if torch.cuda.is_available():
        return _find_unsupported(torch.device("cuda", torch.cuda.current_device()))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not _DRIVER.exists() or hidden in ("", "-1"):
        return None
    if torch.version.cuda is None:
        return "this torch is built for CPUs only: pip install a torch that is built for CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        if "too old" in cause or "insufficient" in cause:
            return f"NVIDIA's driver is too old for CUDA {torch.version.cuda}: install a newer one ({cause})"
        return cause
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU of this machine"
    return "torch finds none of the driver's devices: is it given to this container (docker: --gpus all)?"


def _find_unsupported(device: torch.device) -> str | None:
    """Why this torch has no kernels for a GPU."""
    least = [int(arch[3:]) for arch in torch.cuda.get_arch_list() if arch[:3] == "sm_" and arch[3:].isdigit()]
    major, minor = torch.cuda.get_device_capability(device)
    if not least or major * 10 + minor >= min(least):
        return None
    name, needs = torch.cuda.get_device_name(device), f"{min(least) // 10}.{min(least) % 10}"
    text = f"{name} has compute capability {major}.{minor}, this torch's kernels need {needs}"
    return f"{text}: pip install an older torch, or device=cpu"


def _describe_choice(count: int, index: int) -> str:
    names = ", ".join(f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if visible is None else f", which CUDA_VISIBLE_DEVICES={visible} leaves"
    return f"one of {names}{because}; a worker would need cuda:{index}"


# What an error of the device means. After a kernel's illegal access, and most other errors of a GPU, every
# later call of the process fails with the same error: CUDA calls it sticky, and only another process can go
# on. Triton, cuBLAS and torch's allocator for CPUs raise plain RuntimeErrors: only the text tells.

_SHORTAGES = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUDA out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation
# Calls that were refused before anything ran, and leave the context intact: cudaErrorInvalidValue,
# cudaErrorInvalidConfiguration, cudaErrorLaunchOutOfResources.
_HARMLESS_CODES = frozenset({1, 9, 701})
_STICKY_TEXTS = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "unspecified launch failure",
    "device-side assert",
    "hardware stack error",
    "uncorrectable ECC error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host had too little memory: a smaller step may fit."""
    if isinstance(error, GroupAborted):  # another rank's error
        return error.is_out_of_memory
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError) and _code_of(error) == _MEMORY_ALLOCATION:
        return True
    return any(text in str(error) for text in _SHORTAGES)


def is_sticky(error: BaseException) -> bool:
    """Whether this process can compute nothing more."""
    if is_out_of_memory(error) or isinstance(error, GroupAborted):
        return False
    if isinstance(error, torch.AcceleratorError):
        return _code_of(error) not in _HARMLESS_CODES
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _STICKY_TEXTS)


def _code_of(error: BaseException) -> int | None:
    """Its cudaError_t, if torch gives it."""
    return getattr(error, "error_code", None)
