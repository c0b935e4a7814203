"""Linear layer on the CPU: y = act(x W^T + b), x [m, K], W [N, K], in a layout packed once (linear.h).

Every output is one fixed chain of operations over K: a row's bits do not depend on the number of rows, its
neighbours or threads, which neither MKL nor oneDNN promises. float32 x has one such chain, of multiply-adds.
bfloat16 x has one a variant, and a process uses one variant: VECTOR widens and multiplies as float32 does,
PAIR is vdpbf16ps of AVX512-BF16, TILE is tdpbf16ps of AMX. The three differ from each other in the last bits
of a sum. Weights of 4 and 8 bits become numbers in registers: float32, so that a layer has the bits of a
plain one with those numbers; for TILE bfloat16, likewise; PAIR multiplies what codes stand for before they
are scaled, adds a group up, and scales the sum: only a codebook is rounded, activations never.
Bytes: W once (bfloat16 x: for each 256 rows); operations 2 m K N.
Legend: G groups of inputs of an output, that have a scale each.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from ..program.huge_pages import allocate_huge
from ..program.program import LinearTable
from .gated_activation import number_activation

_PANEL_SIZE = 32


class Variant(IntEnum):
    """How bfloat16 x is multiplied; QuireLinearVariant of linear.h."""

    VECTOR = 0
    PAIR = 1
    TILE = 2


class Format(IntEnum):
    """What W is stored as; QuireLinearFormat of linear.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT4 = 2
    INT8 = 3
    FP8 = 4


_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight as the kernels read it. The tensors are kept for the addresses in tables."""

    format: Format
    num_out: int
    num_in: int
    packed: Tensor  # uint8
    group_size: int = 0  # from here on of narrow weights
    scales: Tensor | None = None
    offsets: Tensor | None = None
    codebook: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that it holds."""
        parts = self.packed, self.scales, self.offsets, self.codebook, self.permutation
        return sum(part.nbytes for part in parts if part is not None)


def choose_variant(library: ctypes.CDLL) -> Variant:
    """The fastest that this processor and the operating system allow."""
    return Variant(library.quire_linear_best_variant())


def find_variants(library: ctypes.CDLL) -> list[Variant]:
    """All that run here."""
    return [variant for variant in Variant if library.quire_linear_has_variant(variant)]


def pack_linear(library: ctypes.CDLL, weight: Tensor) -> PackedWeight:
    """A copy of the weight [N, K] of float32 or bfloat16, of about its size. All threads pack."""
    num_out, num_in = weight.shape
    return _pack(library, Variant.VECTOR, _FORMATS[weight.dtype], weight, num_out, num_in)


def pack_narrow_linear(
    library: ctypes.CDLL,
    variant: Variant,
    codes: Tensor,
    scales: Tensor,
    bits: int,
    num_in: int,
    group_size: int = 0,
    offsets: Tensor | None = None,
    codebook: Tensor | None = None,
    permutation: Tensor | None = None,
) -> PackedWeight:
    """A copy of codes * scales - offsets, or codebook[codes] * scales - offsets.

    `codes`: float8_e4m3fn [N, K]; uint8 [N, K]; or of 4 bits uint8 [N, ceil(K / 2)], the even k in the low
    half of a byte. `scales` [N, G] float32 or bfloat16 and `offsets` [N, G] float32 are of groups of
    `group_size` inputs, a multiple of 16 or 0 for all of K; without offsets integers are symmetric around 8
    or 128. `codebook` float32 [16]; `permutation` int32 [K]: the input that each k takes. Only this variant
    may multiply it; float32 x takes any but TILE.
    """
    num_out, format = len(codes), Format.INT4 if bits == 4 else Format.INT8
    if codes.dtype == torch.float8_e4m3fn:
        format, codes = Format.FP8, codes.view(torch.uint8)
    plain = _pack(library, variant, format, codes, num_out, num_in)
    return PackedWeight(
        format,
        num_out,
        num_in,
        plain.packed,
        group_size,
        _pack_groups(scales),
        None if offsets is None else _pack_groups(offsets),
        codebook,
        permutation,
    )


def _pack(
    library: ctypes.CDLL, variant: Variant, format: Format, weight: Tensor, num_out: int, num_in: int
) -> PackedWeight:
    weight = weight.contiguous()
    packed = allocate_huge(library.quire_linear_packed_bytes(variant, format, num_out, num_in))
    library.quire_linear_pack(variant, format, weight, num_out, num_in, packed)
    return PackedWeight(format, num_out, num_in, packed)


def _pack_groups(numbers: Tensor) -> Tensor:
    """[N, G] as [panels, G, 32], zeros past N."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % _PANEL_SIZE))
    return padded.view(-1, _PANEL_SIZE, numbers.shape[1]).transpose(1, 2).contiguous()


def make_table(
    weight: PackedWeight, variant: Variant, bias: Tensor | None = None, activation: str | None = None
) -> LinearTable:
    """The layer as the kernels take it: addresses that hold while the tensors live.

    An activation (of ACTIVATIONS) is of the sum before it is rounded. The bias is of x's type.
    """
    scales = weight.scales
    return LinearTable(
        packed=weight.packed.data_ptr(),
        scales=_address(scales),
        offsets=_address(weight.offsets),
        codebook=_address(weight.codebook),
        permutation=_address(weight.permutation),
        bias=_address(bias),
        num_in=weight.num_in,
        num_out=weight.num_out,
        variant=variant,
        format=weight.format,
        group_size=weight.group_size,
        has_bf16_scales=scales is not None and scales.dtype is torch.bfloat16,
        activation=number_activation(activation),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def launch_linear(library: ctypes.CDLL, table: LinearTable, x: Tensor) -> Tensor:
    """y [m, N] for contiguous x [m, K] on the CPU, float32 or bfloat16; a plain weight's type is x's."""
    y = x.new_empty((x.shape[0], table.num_out))
    is_bf16 = x.dtype is torch.bfloat16
    library.quire_linear(ctypes.addressof(table), is_bf16, x, x.shape[0], y)
    return y
