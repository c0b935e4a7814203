"""GgufTensor: where a tensor lies in a GGUF file, in which of ggml's types, and what the model calls it.

The frontend makes the table of a file's header; the worker reads these places and knows no header.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import msgspec

GgmlType = Literal[
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip

# Numbers of a block, and its bytes (ggml-common.h).
BLOCKS: dict[GgmlType, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}

# What experts' gates and projections up in one tensor are called, and each half of it.
FUSED, HALVES = "gate_up_proj", ("gate_proj", "up_proj")
FLOATS: tuple[GgmlType, ...] = ("F32", "F16", "BF16")  # of which a block is one number


def count_row_bytes(type_: GgmlType, width: int) -> int:
    """Bytes of a row of `width` numbers, which is a multiple of the type's block."""
    numbers, size_bytes = BLOCKS[type_]
    return width // numbers * size_bytes


class GgufTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in torch's order of dimensions. A `name` with {} is that of many, stacked by the first one."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    file: int  # which of the model's weight files
    offset: int  # bytes from the file's beginning
    # Rows of each of so many heads lie in pairs (0, half, 1, half + 1 ...), as llama.cpp turns them; 0: not.
    num_paired_heads: int = 0
    has_added_one: bool = False  # 1 more is stored than the model's norm holds

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in the file."""
        return prod(self.shape[:-1]) * count_row_bytes(self.type, self.shape[-1])


def find_main_type(tensors: Sequence[GgufTensor]) -> GgmlType:
    """The type that most bytes have."""
    types: list[GgmlType] = _rank_types(tensors) or ["BF16"]  # of a file without tensors
    return types[0]


def describe_types(tensors: Sequence[GgufTensor]) -> str:
    """The matrices' types, those of most bytes first: 'Q4_0', 'Q4_K and Q6_K', 'Q4_K, Q6_K and other'."""
    types = _rank_types([tensor for tensor in tensors if len(tensor.shape) > 1]) or [find_main_type(tensors)]
    return " and ".join(types) if len(types) < 3 else f"{types[0]}, {types[1]} and other"


def _rank_types(tensors: Sequence[GgufTensor]) -> list[GgmlType]:
    sizes: dict[GgmlType, int] = {}
    for tensor in tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size_bytes
    return sorted(sizes, key=lambda name: -sizes[name])
