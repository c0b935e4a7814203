"""Linear layer on the CPU: y = act(x W^T + b), x [m, K], W [N, K], in a layout packed once (linear.h).

Every output is one fixed chain of operations over K: a row's bits do not depend on the number of rows, its
neighbours or threads, which neither MKL nor oneDNN promises. float32 has one such chain, of multiply-adds.
bfloat16 and int8 weights have one a variant, and a process uses one variant: VECTOR widens and multiplies as
float32 does, PAIR is vdpbf16ps of AVX512-BF16, TILE is tdpbf16ps of AMX, and for int8 weights exact sums of
whole numbers (linear_integers.h). The three differ from each other in the last bits of a sum. Bytes: W once
(bfloat16 at most once for each 256 rows, int8 in tiles: 80); operations 2 m K N.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from .gated_activation import number_activation
from .huge_pages import allocate_huge


class Variant(IntEnum):
    """How bfloat16 and int8 weights are multiplied; QuireLinearVariant of linear.h."""

    VECTOR = 0
    PAIR = 1
    TILE = 2


FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [m, N]."""
    return F.linear(x, weight, bias)


def choose_variant(library: ctypes.CDLL) -> Variant:
    """The fastest that this processor and the operating system allow."""
    return Variant(library.quire_linear_best_variant())


def find_variants(library: ctypes.CDLL) -> list[Variant]:
    """All that run here."""
    return [variant for variant in Variant if library.quire_linear_has_variant(variant)]


def pack_linear(library: ctypes.CDLL, weight: Tensor) -> Tensor:
    """The weight [N, K] of float32, bfloat16 or int8 (above -128) as a packed copy, uint8 of about its size.

    All threads pack. Aligned to 64 bytes.
    """
    weight = weight.contiguous()
    num_out, num_in = weight.shape
    packed = _allocate_packed(library, weight.dtype, num_out, num_in)
    library.quire_linear_pack(FORMATS[weight.dtype], weight.data_ptr(), num_out, num_in, packed.data_ptr())
    return packed


def quantize_and_pack_linear(library: ctypes.CDLL, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 or bfloat16 weight [N, K] as packed int8, and the scales float32 [N] (linear_int8.py)."""
    weight = weight.contiguous()
    num_out, num_in = weight.shape
    packed = _allocate_packed(library, torch.int8, num_out, num_in)
    scales = torch.empty(num_out, dtype=torch.float32)
    library.quire_linear_quantize(
        weight.dtype is torch.bfloat16,
        weight.data_ptr(),
        num_out,
        num_in,
        packed.data_ptr(),
        scales.data_ptr(),
    )
    return packed, scales


def _allocate_packed(library: ctypes.CDLL, dtype: torch.dtype, num_out: int, num_in: int) -> Tensor:
    return allocate_huge(library.quire_linear_packed_bytes(FORMATS[dtype], num_out, num_in))


def launch_linear(
    library: ctypes.CDLL,
    variant: Variant,
    x: Tensor,
    packed: Tensor,
    num_out: int,
    bias: Tensor | None,
    weight_dtype: torch.dtype,
    scales: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """y [m, N] for contiguous x [m, K], float32 or bfloat16, and a packed weight, on the CPU.

    The weight is of x's type, or int8: then y = (x q^T) scales + b with scales float32 [N]. An activation (of
    ACTIVATIONS) is of the sum before it is rounded.
    """
    rows, num_in = x.shape
    y = x.new_empty((rows, num_out))
    library.quire_linear(
        variant,
        FORMATS[weight_dtype],
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        rows,
        num_in,
        packed.data_ptr(),
        num_out,
        None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        number_activation(activation),
        y.data_ptr(),
    )
    return y
