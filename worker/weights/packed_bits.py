"""Integers of a few bits in words of 32, as GPTQ, AWQ and compressed-tensors store them.

The numbers of a row follow each other from the low bits of its first word on, across the borders of words.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .integer_weight import IntegerWeight, pack_nibbles, unpack_nibbles


def count_words(count: int, bits: int) -> int:
    """Words that so many numbers take."""
    return -(-count * bits // 32)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """uint8 [rows, count] of int32 [rows, words]."""
    # Little-endian, as safetensors are. A transposed row counts as contiguous, and yet has no bytes to view.
    as_bytes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return as_bytes[:, :count]
    if bits == 4:
        return unpack_nibbles(as_bytes, count)
    # Every 8 numbers begin with a byte, and none reaches over more than two.
    runs = torch.nn.functional.pad(as_bytes, (0, -as_bytes.shape[1] % bits + bits)).unfold(1, bits + 1, bits)
    out = torch.empty((*runs.shape[:2], 8), dtype=torch.uint8)
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        pair = runs[..., byte].short() | runs[..., byte + 1].short() << 8
        out[..., index] = pair >> shift & (1 << bits) - 1
    return out.flatten(1)[:, :count]


def make_weight(
    codes: Tensor, scales: Tensor, bits: int, group_size: int, zeros: Tensor | None = None
) -> IntegerWeight:
    """Of codes uint8 [out, in] of so many bits: value = (code - zero) * scale; zeros: float32 [out, groups].

    Without zeros the zero of all is 2^(bits - 1).
    """
    wide = 4 if bits <= 4 else 8
    if zeros is None and bits != wide:
        codes = codes + ((1 << wide - 1) - (1 << bits - 1))
    packed = codes if wide == 8 else pack_nibbles(codes)
    return make_packed(packed, scales, wide, codes.shape[1], group_size, zeros)


def make_packed(
    packed: Tensor, scales: Tensor, bits: int, num_in: int, group_size: int, zeros: Tensor | None = None
) -> IntegerWeight:
    """As `make_weight`, of codes of 8 bits or, two in a byte, of 4."""
    offsets = None if zeros is None else zeros * scales
    return IntegerWeight(packed.contiguous(), scales, bits, num_in, group_size, offsets)


def make_weight_of_words(
    words: Tensor,
    scales: Tensor,
    bits: int,
    num_in: int,
    group_size: int,
    zeros: Tensor | None = None,
    permutation: Tensor | None = None,
) -> IntegerWeight:
    """As `make_weight`, of words int32 [out, words], whose inputs are taken in the order of `permutation`."""
    if permutation is None and bits in (4, 8):  # as they are in memory too
        packed = words.contiguous().view(torch.uint8)[:, : -(-num_in * bits // 8)]
        return make_packed(packed, scales, bits, num_in, group_size, zeros)
    codes = unpack_words(words, bits, num_in)
    if permutation is None:
        return make_weight(codes, scales, bits, group_size, zeros)
    weight = make_weight(codes.index_select(1, permutation), scales, bits, group_size, zeros)
    return replace(weight, permutation=permutation)


def sort_by_group(group_of: Tensor, group_size: int) -> Tensor | None:
    """The order of inputs in which each group's follow each other; None where they do so already.

    Raises ValueError for a group that has not `group_size` inputs, the last one the rest.
    """
    expected = torch.arange(len(group_of), dtype=group_of.dtype) // group_size
    ordered, permutation = group_of.sort(stable=True)
    if not torch.equal(ordered, expected):
        last = int(expected[-1])
        raise ValueError(f"{group_size} inputs of each group from 0 to {last}")
    return None if torch.equal(group_of, expected) else permutation.int()
