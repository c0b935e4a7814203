"""Attention over the paged KV cache: a backend for each implementation that kernels/choice.py names."""

from __future__ import annotations

import logging

import torch

from ...ipc.spec.config import AttentionBackendName
from ...ipc.spec.model_spec import AttentionSpec, KVCacheDtype
from ...kernels.choice import choose_attention, native_library
from .backend import AttentionBackend, QKNorm, value_size_of
from .native_attention import NativeAttention
from .torch_attention import TorchAttention

_LOGGER = logging.getLogger(__name__)

__all__ = ["AttentionBackend", "QKNorm", "make_attention"]


def make_attention(
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device,
    is_strict: bool = False,
    wanted: AttentionBackendName = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
) -> AttentionBackend:
    """The fastest backend that computes this attention on this device, or the `wanted` one if it does.

    `is_strict` asks for rows whose bits do not depend on the batch: the C++ kernels always give them, the
    Triton kernels when asked, torch operations on a GPU do not.
    """
    heads = spec.num_heads, spec.num_kv_heads, spec.head_size
    reasons = {
        "queries see the keys after them": not spec.is_causal,
        "exact rows are asked for": is_strict,
        "scores have sinks": spec.sinks is not None,
        "the KV cache is of latents": spec.latent is not None,
        f"the KV cache is {kv_cache_dtype}": kv_cache_dtype != "auto",
    }
    why = next((reason for reason, is_true in reasons.items() if is_true), None)
    if wanted == "flashinfer" and why is not None:
        _LOGGER.warning("attention_backend=flashinfer does not cover this model: %s; another is used", why)
        wanted = "auto"
    chosen = choose_attention(*heads, dtype, device, wanted, value_size_of(spec))
    if chosen == "flashinfer":
        from .flashinfer_attention import FlashInferAttention

        return FlashInferAttention(spec, dtype, device)
    if chosen == "triton":
        from .triton_attention import TritonAttention, find_card

        return TritonAttention(spec.num_heads, find_card(device), is_strict)
    if chosen == "native":
        return NativeAttention(native_library(), spec.num_heads)
    return TorchAttention(spec.num_heads)
