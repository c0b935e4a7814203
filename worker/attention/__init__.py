"""Attention over the paged KV cache: variants by file, one chooser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...kernels.native import find_library
from ...kernels.paged_attention import MAX_NATIVE_HEAD_SIZE
from .backend import AttentionBackend, QKNorm
from .native_attention import NativeAttention
from .torch_attention import TorchAttention

if TYPE_CHECKING:
    import torch

    from ...ipc.config import ModelShape

__all__ = ["AttentionBackend", "QKNorm", "choose_attention"]


def choose_attention(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The fastest backend that computes this model on this device."""
    library = find_library(dtype, device)
    if library is not None and shape.head_size % 8 == 0 and shape.head_size <= MAX_NATIVE_HEAD_SIZE:
        return NativeAttention(library, shape.num_heads)
    return TorchAttention(shape.num_heads)
