"""Which implementation of an operation runs on a device: said here and nowhere else, asked at load.

"triton" is the file <operation>_triton.py, to be imported only where it was chosen; "native" the compiled
library; "torch" the reference, which runs everywhere and covers everything.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Literal

import torch

from .attention.flashinfer_attention import find_uncovered as find_flashinfer_uncovered
from .attention.paged_attention import MAX_NATIVE_HEAD_SIZE
from .program.native import find_library, load_library
from .triton.triton_runtime import can_use_triton

Implementation = Literal["triton", "native", "torch", "flashinfer"]

_LOGGER = logging.getLogger(__name__)

# What there is beside torch, the best first.
_IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "argmax": ("native",),
    "causal_conv": ("triton", "native"),
    "delta_rule": ("triton", "native"),
    "experts": ("triton", "native"),
    "gated_activation": ("triton", "native"),
    "gather_rows": ("triton",),
    "layer_norm": ("triton", "native"),
    "linear": ("native", "triton"),
    "log_totals": ("triton",),
    "logprobs": ("native",),
    "mamba2": ("triton", "native"),
    "paged_attention": ("triton", "native"),
    "penalties": ("triton", "native"),
    "pool_rows": ("triton", "native"),
    "product": ("native",),
    "program": ("native",),
    "quantize_groups": ("native",),
    "rms_norm": ("triton", "native"),
    "sample": ("triton", "native"),
    "soft_cap": ("native",),
    "token_bitmask": ("triton", "native"),
    "xielu": ("native",),
}


def choose_kernel(
    operation: str, dtype: torch.dtype, device: torch.device, *without: Implementation
) -> Implementation:
    """The best implementation on this device of this type, leaving out some that do not cover the case."""
    for implementation in _IMPLEMENTATIONS[operation]:
        if implementation not in without and _is_there(implementation, dtype, device):
            return implementation
    return "torch"


def choose_norm(
    size: int, dtype: torch.dtype, device: torch.device, operation: str = "rms_norm"
) -> Implementation:
    """The kernel for norms of rows of `size` numbers; the operation is rms_norm or layer_norm."""
    chosen = choose_kernel(operation, dtype, device)
    if chosen == "triton":
        from .norm.rms_norm_triton import MAX_ROW_SIZE

        if size > MAX_ROW_SIZE:
            return choose_kernel(operation, dtype, device, "triton")
    return chosen


def choose_linear(
    dtype: torch.dtype, device: torch.device, format: str | None, is_strict: bool
) -> Implementation:
    """Of weights in a format, None: x's type; "int8": with a scale an output; "narrow": any other.

    On a GPU exact rows cost time: only if `is_strict`, or where torch has nothing faster.
    """
    without_triton = format is None and not is_strict
    return choose_kernel("linear", dtype, device, *(("triton",) if without_triton else ()))


def choose_attention(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    wanted: str = "auto",
    value_size: int | None = None,
) -> Implementation:
    """The `wanted` one if it covers the heads; one log line says where it, or Triton's kernels, do not.

    `value_size`: values are so many of the keys' first numbers.
    """
    if wanted == "torch":
        return "torch"
    if wanted == "flashinfer":
        uncovered = find_flashinfer_uncovered(num_heads, num_kv_heads, head_size, dtype, device)
        if uncovered is None:
            return "flashinfer"
        _LOGGER.warning("attention_backend=flashinfer is not used: %s", uncovered)
    without: list[Implementation] = []
    if choose_kernel("paged_attention", dtype, device) == "triton":
        from .attention.paged_attention_triton import find_uncovered

        uncovered = find_uncovered(num_heads, num_kv_heads, head_size, dtype, value_size)
        if uncovered is not None:
            _LOGGER.warning(
                "Triton's paged attention does not cover %s; torch operations take its place", uncovered
            )
            without.append("triton")
    if head_size % 8 or head_size > MAX_NATIVE_HEAD_SIZE or (value_size or 0) % 16:
        without.append("native")
    return choose_kernel("paged_attention", dtype, device, *without)


def native_library() -> ctypes.CDLL:
    """The compiled kernels, for who was told "native"."""
    library = load_library()
    assert library is not None
    return library


def _is_there(implementation: Implementation, dtype: torch.dtype, device: torch.device) -> bool:
    if implementation == "triton":
        return can_use_triton(device)
    return find_library(dtype, device) is not None
