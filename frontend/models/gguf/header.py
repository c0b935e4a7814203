"""Reads the header of a GGUF file: its metadata and table of tensors, held against the file's size.

Nothing is allocated that a count or length in the file calls for before the file is known to have as many
bytes. Layout: ggml's docs/gguf.md, versions 2 and 3, little-endian. Knows no model.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ....ipc.errors import ModelError, shorten_name
from ....ipc.spec.gguf_tensor import BLOCKS, GgmlType, count_row_bytes
from ..model_files import open_regular

MAX_HEADER_BYTES = 128 << 20  # the largest that is known has 16 MB: 262,144 tokens and their merges
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_ELEMENTS = 4 << 20  # of all arrays together; 262,144 tokens with scores, types and merges are 1,300,000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
_MAX_NAME_BYTES = 65_535  # of a key, by the format; ggml's own bound of a tensor's name is 64
_MAX_TEXT_BYTES = 16 << 20  # a chat template, a licence
_MAX_SIZE = 2**63 - 1

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_TYPE_IDS: dict[int, GgmlType] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    30: "BF16",
    39: "MXFP4",
}
# Others that files have, so that a refusal can name them.
_UNREAD_TYPES = (
    {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
    | {21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
    | {28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A row of the table: `shape` in torch's order, `offset` from the file's beginning."""

    file: Path
    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    def read_floats(self) -> tuple[float, ...]:
        """The numbers of a small F32 tensor."""
        with open_regular(self.file) as stream:
            stream.seek(self.offset)
            return struct.unpack(f"<{prod(self.shape)}f", stream.read(self.size_bytes))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its data. `size_bytes` is the header's own; arrays of numbers are lists."""

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    size_bytes: int


def read_header(file: Path) -> GgufHeader:
    """Read and check it; ModelError with the file, the field, its value and what is allowed."""
    with open_regular(file) as stream:
        try:
            return _Reader(file, stream).read()
        except OSError as error:
            raise ModelError(file.name, str(file), f"a file that can be read ({error.strerror})") from error


class _Reader:
    """A place in the stream; every read is checked against what the file still has."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._place = 0
        self._num_elements = 0

    def read(self) -> GgufHeader:
        magic = self._take("magic", 4)
        if magic != b"GGUF":
            raise self._error("magic", magic, "b'GGUF', with which a GGUF file begins")
        version = self._number("version", "I")
        if version not in (2, 3):
            raise self._error("version", version, "2 or 3, little-endian")
        num_tensors = self._count("tensor_count", 25, MAX_TENSORS)
        num_keys = self._count("metadata_kv_count", 13, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._text(f"key {index}", _MAX_NAME_BYTES)
            if key in metadata:
                raise self._error("key", key, "a key that comes once")
            metadata[key] = self._value(key)
        rows = [self._tensor(index) for index in range(num_tensors)]
        return GgufHeader(self._file, metadata, self._place_tensors(metadata, rows), self._place)

    def _tensor(self, index: int) -> StoredTensor:
        """A row whose offset is still from the beginning of the data."""
        name = self._text(f"name of tensor {index}", _MAX_NAME_BYTES)
        field = f"tensor {name}"
        num_dimensions = self._number(f"{field} n_dims", "I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"{field} n_dims", num_dimensions, f"1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number(f"{field} dims", "Q") for _ in range(num_dimensions))[::-1]
        if not all(shape) or prod(shape) > _MAX_SIZE:
            raise self._error(f"{field} dims", list(shape), "sizes above 0, whose product is below 2**63")
        type_ = self._type(field, self._number(f"{field} type", "I"))
        numbers = BLOCKS[type_][0]
        if shape[-1] % numbers:
            allowed = f"a row of a multiple of {numbers} numbers, a block of {type_}"
            raise self._error(f"{field} dims", list(shape), allowed)
        size_bytes = prod(shape[:-1]) * count_row_bytes(type_, shape[-1])
        offset = self._number(f"{field} offset", "Q")
        return StoredTensor(self._file, name, type_, shape, offset, size_bytes)

    def _type(self, field: str, type_id: int) -> GgmlType:
        type_ = _TYPE_IDS.get(type_id)
        if type_ is None:
            shown = _UNREAD_TYPES.get(type_id, type_id)
            raise self._error(f"{field} type", shown, f"one of {', '.join(_TYPE_IDS.values())}")
        return type_

    def _place_tensors(self, metadata: dict[str, Any], rows: list[StoredTensor]) -> dict[str, StoredTensor]:
        """By name, at their places in the file: aligned, within it, and none over another."""
        alignment = metadata.get("general.alignment", 32)
        is_fit = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT
        if not is_fit or alignment & (alignment - 1):
            raise self._error("general.alignment", alignment, f"a power of 2 from 8 to {MAX_ALIGNMENT}")
        start = -(-self._place // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        end, before = 0, ""
        for row in sorted(rows, key=lambda row: row.offset):
            field = f"tensor {row.name} offset"
            if row.name in tensors:
                raise self._error("tensor", row.name, "a name that comes once")
            if row.offset % alignment:
                raise self._error(field, row.offset, f"a multiple of general.alignment={alignment}")
            if row.offset < end:
                raise self._error(field, row.offset, f"at least {end}, where tensor {before} ends")
            end, before = row.offset + row.size_bytes, row.name
            if start + end > self._size:
                shown = f"{row.type} {list(row.shape)} ends at {start + end}"
                allowed = f"within the file's {self._size} bytes; {shown}; truncated?"
                raise self._error(field, row.offset, allowed)
            tensors[row.name] = replace(row, offset=start + row.offset)
        return tensors

    def _value(self, key: str) -> Any:
        kind = self._number(f"{key} type", "I")
        if kind in _NUMBERS:
            return self._number(key, _NUMBERS[kind])
        if kind == _TEXT:
            return self._text(key, _MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        raise self._error(f"{key} type", kind, "a value type of GGUF, 0 to 12")

    def _array(self, key: str) -> list[Any]:
        kind = self._number(f"{key} element type", "I")
        if kind not in _NUMBERS and kind != _TEXT:
            raise self._error(f"{key} element type", kind, "numbers or texts")
        letter = _NUMBERS.get(kind, "")
        width = struct.calcsize(f"<{letter}") if letter else 8
        count = self._count(f"{key} length", width, MAX_ELEMENTS - self._num_elements)
        self._num_elements += count
        if letter:
            return list(struct.unpack(f"<{count}{letter}", self._take(key, count * width)))
        return [self._text(key, _MAX_NAME_BYTES) for _ in range(count)]

    def _text(self, field: str, max_bytes: int) -> str:
        length = self._number(f"{field} length", "Q")
        if length > max_bytes:
            raise self._error(f"{field} length", length, f"at most {max_bytes} bytes")
        try:
            return self._take(field, length).decode()
        except UnicodeDecodeError as error:
            raise self._error(field, error.object, "UTF-8") from None

    def _count(self, field: str, least_bytes: int, most: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = self._number(field, "Q")
        room = (self._size - self._place) // least_bytes
        if count > min(room, most):
            allowed = f"at most {most}, and {room} in what is left of the file's {self._size} bytes"
            raise self._error(field, count, allowed + "; truncated?" * (count <= most))
        return count

    def _number(self, field: str, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(field, struct.calcsize(f"<{letter}")))[0]

    def _take(self, field: str, count: int) -> bytes:
        self._place += count
        if self._place > MAX_HEADER_BYTES:
            raise self._error(field, f"{self._place} bytes", f"a header of at most {MAX_HEADER_BYTES} bytes")
        data = self._stream.read(count) if self._place <= self._size else b""
        if len(data) < count:
            allowed = f"{count} bytes at {self._place - count}; the file ends at {self._size}"
            raise self._error(field, "truncated", allowed)
        return data

    def _error(self, field: str, value: object, allowed: str) -> ModelError:
        return ModelError(f"{self._file.name} {shorten_name(field)}", value, allowed)
