"""A worker's bytes as JSON, and what is compared of them."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading

import pytest
from quire.frontend.http.dialects.scores import compare
from quire.frontend.http.dialects.vector_request import (
    Format,
    make_row_writer,
    read_score,
    write_base64,
    write_beside,
    write_floats,
)


def pack(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_base64_is_of_the_bytes_themselves_whatever_they_are() -> None:
    data = bytes(range(256))
    assert base64.b64decode(json.loads(write_base64(data))) == data


def test_numbers_come_back_as_the_same_float32() -> None:
    data = pack(0.1, -3.5e-7, 1e38, 0.0)
    assert pack(*json.loads(write_floats(data))) == data
    rows = [json.loads(write_floats(part)) for part in (data[:8], data[8:])]
    assert json.loads(make_row_writer(2)(data)) == rows
    assert pack(read_score(pack(0.1))) == pack(0.1)


def test_what_is_not_finite_is_null() -> None:
    assert write_floats(pack(float("nan"), float("inf"), 1.0)) == b"[null,null,1.0]"


@pytest.mark.parametrize(("form", "size"), [("float", 40_000), ("base64", 2 << 20)])
def test_a_large_answer_is_written_beside_the_event_loop(form: Format, size: int) -> None:
    async def find_thread(data: list[bytes]) -> int:
        threads: list[int] = []

        def make() -> bytes:
            threads.append(threading.get_ident())
            return b""

        await write_beside(data, form, make)
        return threads[0]

    own = threading.get_ident()
    assert asyncio.run(find_thread([bytes(64)])) == own
    assert asyncio.run(find_thread([bytes(64)] * (size // 64))) != own


def test_vectors_are_compared_by_their_cosine() -> None:
    one, other = pack(3.0, 4.0), pack(-4.0, 3.0)
    found = asyncio.run(compare([one], [one, other, pack(-6.0, -8.0), pack(0.0, 0.0)]))
    assert found == pytest.approx([1.0, 0.0, -1.0, 0.0])
    assert asyncio.run(compare([one, other], [other, other])) == pytest.approx([0.0, 1.0])
