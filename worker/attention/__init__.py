"""Attention over the paged KV cache: variants by file, one chooser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .backend import AttentionBackend, QKNorm

if TYPE_CHECKING:
    import torch

    from ...ipc.config import ModelShape

__all__ = ["AttentionBackend", "QKNorm", "choose_attention"]


def choose_attention(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The fastest backend that computes this model on this device."""
    from .torch_attention import TorchAttention

    del dtype, device
    return TorchAttention(shape.num_heads)
