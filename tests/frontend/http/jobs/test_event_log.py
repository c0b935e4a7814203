"""Events that are kept, and read from any number on while they come."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st
from quire.frontend.http.bodies.schema import TokenLogprob
from quire.frontend.http.jobs.event_log import EventLog
from quire.frontend.http.stream import Json, encode_named_event

KINDS = ("response.output_text.delta", "response.reasoning_text.delta", "response.created")


def make_event(number: int, kind: str = KINDS[0], delta: str = "", item: str = "a", top: int = 0) -> Json:
    event: Json = {"type": kind, "sequence_number": number}
    if kind == KINDS[2]:
        return event
    told = {"logprobs": [TokenLogprob("x", -1.0, [1], [])] * top} if kind == KINDS[0] else {}
    return event | {"item_id": item, "output_index": 0, "content_index": 0, "delta": delta} | told


def read_all(log: EventLog, number: int) -> bytes:
    parts: list[bytes] = []
    while True:
        data, number = log.read(number)
        if not data:
            return b"".join(parts)
        parts.append(data)


TOLD = st.tuples(st.sampled_from(KINDS), st.text(max_size=4), st.sampled_from("ab"), st.integers(0, 1))


@given(st.lists(TOLD), st.integers(0, 40))
def test_what_is_read_from_any_number_on_is_what_a_stream_had(
    told: list[tuple[str, str, str, int]], start: int
) -> None:
    events = [make_event(number, *fields) for number, fields in enumerate(told)]
    log = EventLog()
    log.add(events[:3])
    log.add(events[3:])
    assert read_all(log, start) == b"".join(map(encode_named_event, events[start:]))
    assert (read_all(log, 0) == b"") == (not events)


def test_pieces_of_a_text_take_little_room_and_are_read_in_parts() -> None:
    log = EventLog()
    for number in range(4000):
        log.add([make_event(number, delta="word ")])
    assert log.num_bytes < 4000 * 10 + 1000
    data, number = log.read(1)
    assert 1 < number < 4000
    assert data.count(b"\n\n") == number - 1


async def test_readers_get_what_is_there_and_what_comes_and_one_that_leaves_costs_nobody_anything() -> None:
    async def read(log: EventLog, number: int) -> list[int]:
        text = b"".join([data async for data in log.follow(number)]).decode()
        return [
            json.loads(line[6:])["sequence_number"] for line in text.split("\n") if line.startswith("data: ")
        ]

    log = EventLog()
    log.add([make_event(0), make_event(1)])
    readers = [asyncio.create_task(read(log, start)) for start in (0, 1, 2, 9)]
    leaver = asyncio.create_task(read(log, 0))
    while len(log._waiting) < 5:
        await asyncio.sleep(0)
    leaver.cancel()
    log.add([make_event(2, "response.created")])
    log.close()
    log.close()
    assert await asyncio.gather(*readers) == [[0, 1, 2], [1, 2], [2], []]
    assert not log._waiting
    assert await read(log, 1) == [1, 2]
