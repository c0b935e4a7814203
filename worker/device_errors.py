"""What an error of the device means: too little memory, or a context that computes nothing any more.

After a kernel's illegal access (and most other errors of a GPU) every later call of the process fails with
the same error: CUDA calls it sticky, and only another process can go on. It knows texts and codes, no steps.
"""

from __future__ import annotations

import torch

from ..kernels.group.shared_group import GroupAborted

# Triton and cuBLAS raise plain RuntimeErrors, torch's allocator for CPUs too: only the text tells.
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
# Of a call that was refused before anything ran: cudaErrorInvalidValue, cudaErrorInvalidConfiguration and
# cudaErrorLaunchOutOfResources leave the context as it was.
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
    """Whether there was too little memory, of the device or of the host; a smaller step may fit."""
    if isinstance(error, GroupAborted):  # another rank has met it
        return error.is_out_of_memory
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError) and _code_of(error) == _MEMORY_ALLOCATION:
        return True
    return any(text in str(error) for text in _SHORTAGES)


def is_sticky(error: BaseException) -> bool:
    """Whether nothing more can be computed in this process."""
    if is_out_of_memory(error) or isinstance(error, GroupAborted):
        return False
    if isinstance(error, torch.AcceleratorError):
        return _code_of(error) not in _HARMLESS_CODES
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _STICKY_TEXTS)


def _code_of(error: BaseException) -> int | None:
    """cudaError_t, where torch says it."""
    return getattr(error, "error_code", None)
