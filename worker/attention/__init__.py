"""Attention over the paged KV cache: a backend for each implementation that kernels/choice.py names."""

from __future__ import annotations

import torch

from ...ipc.model_spec import AttentionSpec
from ...kernels.choice import choose_attention, native_library
from .backend import AttentionBackend, QKNorm
from .native_attention import NativeAttention
from .torch_attention import TorchAttention

__all__ = ["AttentionBackend", "QKNorm", "make_attention"]


def make_attention(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, is_strict: bool = False
) -> AttentionBackend:
    """The fastest backend that computes this attention on this device.

    `is_strict` asks for rows whose bits do not depend on the batch: the C++ kernels always give them, the
    Triton kernels when asked, torch operations on a GPU do not.
    """
    chosen = choose_attention(spec.num_heads, spec.num_kv_heads, spec.head_size, dtype, device)
    if chosen == "triton":
        from .triton_attention import TritonAttention, find_card

        return TritonAttention(spec.num_heads, find_card(device), is_strict)
    if chosen == "native":
        return NativeAttention(native_library(), spec.num_heads)
    return TorchAttention(spec.num_heads)
