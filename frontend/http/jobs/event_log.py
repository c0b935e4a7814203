"""EventLog: the events of a response, kept so that any number of readers can follow them from any on.

Pieces of one text that follow each other are kept as that text and the places where it was cut: some ten
bytes a token instead of 250.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from ..stream import Json, encode_named_event

_ENTRY_BYTES = 200  # of an entry beside its texts
_MAX_EVENTS = 256  # of one reading: a millisecond


@dataclass(slots=True)
class _Pieces:
    """Events that differ in `delta` and their number alone. first: one of them."""

    first: Json
    text: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("I"))  # of each piece in `text`

    def add(self, event: Json) -> int:
        """One more; returns how many bytes it takes."""
        piece = str(event["delta"]).encode()
        self.text += piece
        self.ends.append(len(self.text))
        return len(piece) + self.ends.itemsize

    def encode(self, begin: int, end: int) -> bytes:
        """From the `begin`th event to before the `end`th."""
        events: list[bytes] = []
        for place in range(begin, end):
            start = self.ends[place - 1] if place else 0
            delta = self.text[start : self.ends[place]].decode()
            number = self.first["sequence_number"] + place
            events.append(encode_named_event(self.first | {"sequence_number": number, "delta": delta}))
        return b"".join(events)


class EventLog:
    """Events are added in their order, whose numbers count from 0, until it is closed. Of one event loop."""

    def __init__(self) -> None:
        self.num_events = 0
        self.num_bytes = 0  # what it takes, about
        self.is_closed = False
        self._entries: list[bytes | _Pieces] = []
        self._firsts: list[int] = []  # the number of each entry's first event
        self._waiting: set[asyncio.Future[None]] = set()

    def add(self, events: Sequence[Json]) -> None:
        """The next events; those who wait for them go on."""
        for event in events:
            self._add(event)
        self._wake()

    def close(self) -> None:
        """There will be no more. Idempotent."""
        self.is_closed = True
        self._wake()

    def read(self, number: int) -> tuple[bytes, int]:
        """Events from that number on, as a stream has them: some, or none; and the number after them."""
        if number >= self.num_events:
            return b"", number
        at = bisect_right(self._firsts, number) - 1
        entry = self._entries[at]
        if isinstance(entry, bytes):
            return entry, number + 1
        begin = number - self._firsts[at]
        end = min(len(entry.ends), begin + _MAX_EVENTS)
        return entry.encode(begin, end), self._firsts[at] + end

    async def follow(self, number: int) -> AsyncGenerator[bytes, None]:
        """Events from that number on, those that are there and those that come, until the last."""
        while True:
            data, number = self.read(number)
            if data:
                yield data
                await asyncio.sleep(0)  # a long log is not read in one go
            elif self.is_closed:
                return
            else:
                await self._wait()

    def _add(self, event: Json) -> None:
        last = self._entries[-1] if self._entries else None
        if "delta" not in event or event.get("logprobs"):
            entry = encode_named_event(event)
            self._append(entry, len(entry))
        elif isinstance(last, _Pieces) and _is_next(last.first, event):
            self.num_bytes += last.add(event)
        else:
            pieces = _Pieces(event)
            self._append(pieces, pieces.add(event))
        self.num_events += 1

    def _append(self, entry: bytes | _Pieces, num_bytes: int) -> None:
        self._entries.append(entry)
        self._firsts.append(self.num_events)
        self.num_bytes += num_bytes + _ENTRY_BYTES

    async def _wait(self) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._waiting.add(woken)
        try:
            await woken
        finally:
            self._waiting.discard(woken)

    def _wake(self) -> None:
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)


def _is_next(first: Json, event: Json) -> bool:
    """Whether an event is one more piece of the same text."""
    return all(first.get(name) == event.get(name) for name in ("type", "item_id", "content_index"))
