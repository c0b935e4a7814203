"""Attention over the paged KV cache: variants by file, one chooser."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...kernels.native import find_library
from ...kernels.paged_attention import MAX_NATIVE_HEAD_SIZE
from ...kernels.triton_runtime import can_use_triton
from .backend import AttentionBackend, QKNorm
from .native_attention import NativeAttention
from .torch_attention import TorchAttention

if TYPE_CHECKING:
    import torch

    from ...ipc.config import ModelShape

__all__ = ["AttentionBackend", "QKNorm", "choose_attention"]

_log = logging.getLogger(__name__)


def choose_attention(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, is_strict: bool = False
) -> AttentionBackend:
    """The fastest backend that computes this model on this device.

    `is_strict` asks for rows whose bits do not depend on the batch: the C++ kernels always give them, the
    Triton kernels when asked. Where a kernel does not cover the model, one log line says so and torch
    operations take its place, which are not strict on a GPU.
    """
    if can_use_triton(device):
        backend = _choose_triton(shape, dtype, device, is_strict)
        if backend is not None:
            return backend
    library = find_library(dtype, device)
    if library is not None and shape.head_size % 8 == 0 and shape.head_size <= MAX_NATIVE_HEAD_SIZE:
        return NativeAttention(library, shape.num_heads)
    return TorchAttention(shape.num_heads)


def _choose_triton(
    shape: ModelShape, dtype: torch.dtype, device: torch.device, is_strict: bool
) -> AttentionBackend | None:
    from ...kernels.paged_attention_triton import find_uncovered
    from .triton_attention import TritonAttention, count_processors

    uncovered = find_uncovered(shape.num_heads, shape.num_kv_heads, shape.head_size, dtype)
    if uncovered is None:
        return TritonAttention(shape.num_heads, count_processors(device), is_strict)
    _log.warning("Triton's paged attention does not cover %s; torch operations take its place", uncovered)
    return None
