"""The blocks of ggml's quantized types as IntegerWeights, which stand for the same numbers bit for bit.

A block's scale is a float16, times a number of 4 to 8 bits in the types of superblocks; such products, and
those with a code, are exact in float32. Layouts: ggml-common.h; the judge is llama.cpp's own `gguf` package.
Legend: N outputs, B blocks of an output, bytes are little-endian, nibble 0 is bits 0-3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...ipc.gguf_tensor import BLOCKS, GgmlType
from .integer_weight import IntegerWeight, pack_nibbles

_Parts = tuple[
    Tensor, Tensor, Tensor | None, int
]  # codes [N, B, numbers], scales [N, B, groups], offsets, bits


def read_blocks(data: Tensor, type_: GgmlType) -> IntegerWeight:
    """The weight of rows of blocks, uint8 [N, bytes of a row], of a quantized type."""
    numbers, size_bytes = BLOCKS[type_]
    blocks = data.view(len(data), -1, size_bytes)
    codes, scales, offsets, bits = _READERS[type_](blocks)
    codes = codes.flatten(1)
    return IntegerWeight(
        codes=codes if bits == 8 else pack_nibbles(codes),
        scales=scales.flatten(1),
        bits=bits,
        num_in=codes.shape[1],
        group_size=numbers // scales.shape[2],
        offsets=None if offsets is None else offsets.flatten(1),
    )


def make_numbers(data: Tensor, type_: GgmlType) -> Tensor:
    """float32 [N, K] of such rows: products are exact, so it rounds as the reference dequantizer does."""
    codes, scales, offsets, bits = _READERS[type_](data.view(len(data), -1, BLOCKS[type_][1]))
    numbers = codes.float()
    groups = numbers.view(*scales.shape, -1)
    if offsets is None:
        groups -= 1 << bits - 1
    groups *= scales.unsqueeze(3)
    if offsets is not None:
        groups -= offsets.unsqueeze(3)
    return numbers.flatten(1)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """float32 [N, B, count] of the float16 numbers at a byte."""
    return blocks[:, :, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """uint8 of bytes [N, B, n]: of each run of them the low nibbles, then the high ones."""
    runs = data.unflatten(2, (-1, 1, run))
    return torch.cat((runs & 15, runs >> 4), 3).flatten(2)


def _fifth_bits(data: Tensor) -> Tensor:
    """uint8 [N, B, 32]: the bits of 4 bytes, as 16 of their places."""
    places = torch.arange(8, dtype=torch.uint8)
    return (data.unsqueeze(3) >> places & 1).flatten(2) << 4


def _read_q8_0(blocks: Tensor) -> _Parts:
    return blocks[:, :, 2:] ^ 128, _halves(blocks, 0), None, 8


def _read_q4_0(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 2:], 16), _halves(blocks, 0), None, 4


def _read_q4_1(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 4:], 16), _halves(blocks, 0), -_halves(blocks, 2), 4


def _read_q5_0(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, :, 6:], 16) | _fifth_bits(blocks[:, :, 2:6])
    return codes + (128 - 16), _halves(blocks, 0), None, 8


def _read_q5_1(blocks: Tensor) -> _Parts:
    codes = _nibbles(blocks[:, :, 8:], 16) | _fifth_bits(blocks[:, :, 4:8])
    return codes, _halves(blocks, 0), -_halves(blocks, 2), 8


def _read_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, B, 8] scales and offsets of Q4_K and Q5_K: 6 bits each, in 12 bytes, times two float16."""
    low, middle, high = blocks[:, :, 4:16].split(4, 2)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 2)
    offsets = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 2)
    return _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * offsets.float()


def _read_q4_k(blocks: Tensor) -> _Parts:
    return _nibbles(blocks[:, :, 16:], 32), *_read_scales(blocks), 4


def _read_q5_k(blocks: Tensor) -> _Parts:
    places = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    fifth = (blocks[:, :, None, 16:48] >> places & 1).flatten(2) << 4  # bit j of byte l: number 32 j + l
    return _nibbles(blocks[:, :, 48:], 32) | fifth, *_read_scales(blocks), 8


def _read_q6_k(blocks: Tensor) -> _Parts:
    places = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)
    high = blocks[:, :, 128:192].unflatten(2, (2, 1, 32)) >> places & 3  # of each half of the block
    codes = _nibbles(blocks[:, :, :128], 64) | high.flatten(2) << 4
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    return codes + (128 - 32), _halves(blocks, 208) * scales, None, 8


_READERS: dict[GgmlType, Callable[[Tensor], _Parts]] = {
    "Q8_0": _read_q8_0,
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}
