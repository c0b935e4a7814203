"""What FlashInfer's paged attention covers, and whether it is there. It is loaded by who uses it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import torch

from ..triton.triton_runtime import can_use_triton

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128, 256)
NOT_INSTALLED = "it is not installed: pip install flashinfer-python"

_CUDA_FOLDER = Path("/usr/local/cuda")


def find_uncovered(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why FlashInfer does not compute such heads here; None: it does."""
    fault = find_fault()
    if fault is not None:
        return fault
    if not can_use_triton(device):
        return f"{device} has no Triton kernels, which write its keys and values"
    if dtype not in DTYPES:
        return f"dtype {dtype}: bfloat16 and float16 are covered"
    if head_size not in HEAD_SIZES:
        return f"head size {head_size}: {', '.join(map(str, HEAD_SIZES))} are covered"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads over {num_kv_heads} kv heads: a multiple is covered"
    return None


def find_fault() -> str | None:
    """Why FlashInfer computes nothing in this process, whatever the heads; None: it can. Loads it."""
    if importlib.util.find_spec("flashinfer") is None:
        return NOT_INSTALLED
    if importlib.util.find_spec("flashinfer_jit_cache") is None and not _has_compiler():
        return "it has no nvcc to compile its kernels: CUDA_HOME, or pip install flashinfer-jit-cache"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # of whatever it loads: attention can do without
        return f"it does not load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def _has_compiler() -> bool:
    """Looks where FlashInfer 0.7 does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return (Path(home or _CUDA_FOLDER) / "bin" / "nvcc").exists()
