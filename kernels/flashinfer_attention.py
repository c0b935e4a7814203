"""What FlashInfer's paged attention covers, and whether it is there. It is loaded by who uses it."""

from __future__ import annotations

import importlib.util

import torch

from .triton_runtime import can_use_triton

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (64, 128, 256)


def find_uncovered(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why FlashInfer does not compute such heads here; None: it does."""
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed: pip install flashinfer-python"
    if not can_use_triton(device):
        return f"{device} has no Triton kernels, which write its keys and values"
    if dtype not in DTYPES:
        return f"dtype {dtype}: bfloat16 and float16 are covered"
    if head_size not in HEAD_SIZES:
        return f"head size {head_size}: {', '.join(map(str, HEAD_SIZES))} are covered"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads over {num_kv_heads} kv heads: a multiple is covered"
    return None
