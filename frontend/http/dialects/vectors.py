"""A worker's vectors -> JSON. A vector is bytes: float32, little-endian.

As base64 its numbers are never looked at. As numbers they are decoded and encoded a vector at a time, and a
large answer is made in a thread, so that the event loop waits for one vector at most.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from binascii import b2a_base64
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from ....ipc.params.pooling_params import FLOAT_BYTES

_MAX_INLINE_FLOATS = 4096  # written in the event loop: 0.9 ms
_MAX_INLINE_BYTES = 1 << 20  # likewise as base64: 1 ms
# What a number costs until the answer has been sent: its bytes, and twice its text.
_PRICES = {"float": 48, "base64": 16}

Format = Literal["float", "base64"]
Write = Callable[[bytes], bytes]

_encode = msgspec.json.Encoder().encode
_read_float = struct.Struct("<f").unpack


def read_floats(data: bytes) -> list[float]:
    """The numbers of a vector."""
    return array("f", data).tolist()


def read_score(data: bytes) -> float:
    """The number of a vector of one."""
    return _read_float(data)[0]


def write_base64(data: bytes) -> bytes:
    """A JSON string of a vector, or of several one behind the other."""
    return b'"%b"' % b2a_base64(data, newline=False)


def write_floats(data: bytes) -> bytes:
    """A JSON list of a vector's numbers. What is not finite becomes null, for which JSON has no number."""
    return _encode(read_floats(data))


def make_row_writer(width: int) -> Write:
    """Writes vectors of so many numbers, one behind the other, as a JSON list of lists."""
    size = width * FLOAT_BYTES

    def write(data: bytes) -> bytes:
        return join_list(write_floats(data[start : start + size]) for start in range(0, len(data), size))

    return write


def join_list(items: Iterable[bytes]) -> bytes:
    """A JSON list."""
    return b"[%b]" % b",".join(items)


def find_price(num_floats: int, form: Format) -> int:
    """Bytes that so many numbers of an answer take in this process."""
    return num_floats * _PRICES[form]


async def write_beside(vectors: list[bytes], form: Format, make: Callable[[], bytes]) -> bytes:
    """`make()`, which writes these vectors in this form: in a thread if there is much to write."""
    size = sum(map(len, vectors))
    is_short = size <= (_MAX_INLINE_BYTES if form == "base64" else _MAX_INLINE_FLOATS * FLOAT_BYTES)
    return make() if is_short else await asyncio.to_thread(make)
