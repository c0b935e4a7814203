"""Asks a server for a response that runs in the background, and behaves as its clients do: it drops the
connection, takes the answer up behind the last event that it has, cancels, and deletes it at last.

A response lives in the HTTP process that made it. If that is lost, so is the response (404), and it is asked
for again; as long as it lives nothing may be missing, doubled or left.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from typing import Any

import msgspec

from ...frontend.events import AssistantMessage
from ...ipc.errors import QuireError
from ..bench.http_stream import AnswerError, Endpoint, EventParser
from .chats import is_beginning, join_message
from .http_client import RefusedError, read_answer
from .record import Record

_PATH = "/v1/responses"
_RETRY_PAUSE_S = 0.1
_PIECES_BETWEEN_CUTS = 7
_MAX_CUTS = 3
_READ_BYTES = 16 * 1024
_MAX_TEXT = 300
_ENDS = ("response.completed", "response.incomplete", "response.failed")


class _LostError(QuireError):
    """Its process has ended, or the answer's beginning never came."""


class _Usage(msgspec.Struct):
    output_tokens: int = 0


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    type: str = ""
    content: list[_Part] = []


class _Response(msgspec.Struct):
    id: str = ""
    status: str = ""
    usage: _Usage | None = None
    output: list[_Item] = []
    error: Any = None


class _Event(msgspec.Struct):
    type: str
    sequence_number: int = 0
    delta: str = ""
    response: _Response | None = None
    message: str = ""  # of a stream that cannot go on


async def ask_in_background(
    endpoint: Endpoint,
    body: dict[str, Any],
    record: Record,
    leave_after: int | None,
    pause_s: float,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Fill the record. `leave_after` so many pieces it is cancelled. Raises RefusedError.

    Tries again for as long as the caller lets it.
    """
    while True:
        record.piece_times, record.text, record.num_tokens, record.num_ends = [], "", 0, 0
        try:
            await _Background(endpoint, record, pause_s, tls).run(body, leave_after)
            return
        except _LostError:
            record.broken_at.append(time.monotonic())
        await asyncio.sleep(_RETRY_PAUSE_S)


class _Background:
    """One response, from its beginning until it is deleted or lost."""

    def __init__(
        self, endpoint: Endpoint, record: Record, pause_s: float, tls: ssl.SSLContext | None
    ) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._record = record
        self._pause_s = pause_s
        self._message = AssistantMessage()
        self._next = 0  # the number of the event that comes next
        self._begun: _Response | None = None
        self._ended: _Response | None = None

    async def run(self, body: dict[str, Any], leave_after: int | None) -> None:
        """Raises _LostError, RefusedError."""
        try:
            await self._read("POST", _PATH, msgspec.json.encode(body), _PIECES_BETWEEN_CUTS)
        except (AnswerError, OSError):
            if self._begun is None:  # nobody knows its name: its process has ended
                raise _LostError("not begun") from None
        num_cuts = 1
        while self._ended is None:
            if leave_after is not None and len(self._record.piece_times) >= leave_after:
                await self._cancel()
                return
            is_last = num_cuts >= _MAX_CUTS and leave_after is None
            path = f"{self._path}?stream=true&starting_after={self._next - 1}"
            try:
                await self._read("GET", path, b"", None if is_last else _PIECES_BETWEEN_CUTS)
                num_cuts += 1
            except (AnswerError, OSError):
                await asyncio.sleep(_RETRY_PAUSE_S)
        record = self._record
        if self._ended.status not in ("completed", "incomplete"):
            raise RefusedError(f"it has ended as {self._ended.status}: {self._ended.error}")
        record.num_tokens = self._ended.usage.output_tokens if self._ended.usage else 0
        record.num_ends, record.end = 1, "finished"
        await self._check_kept(self._ended)

    @property
    def _path(self) -> str:
        assert self._begun is not None
        return f"{_PATH}/{self._begun.id}"

    async def _cancel(self) -> None:
        """What is answered is final: it has all that has been told, and can be deleted at once."""
        cancelled = await self._call("POST", f"{self._path}/cancel", may_have_ended=True)
        record = self._record
        if cancelled is None:  # it had ended, or its process has
            record.end = "left"
            await self._delete()
            return
        told, text = record.text, _join(cancelled)
        if cancelled.status != "cancelled" or not is_beginning(told, text):
            raise RefusedError(f"cancel answered {cancelled.status} with {text!r} after {told!r}")
        record.text, record.end = text, "left"
        await self._check_kept(cancelled)

    async def _check_kept(self, owed: _Response) -> None:
        """What the server has of it is what it has told; then it goes."""
        try:
            kept = await self._call("GET", self._path)
        except _LostError:
            return  # with all that was to be read
        if kept is not None and (kept.status, _join(kept)) != (owed.status, _join(owed)):
            raise RefusedError(f"it is kept as {kept.status} {_join(kept)!r}, not as it ended")
        if _join(owed) != self._record.text:
            raise RefusedError(f"it has {_join(owed)!r}, and its events told {self._record.text!r}")
        await self._delete()

    async def _delete(self) -> None:
        with contextlib.suppress(_LostError):  # with its process, or a try before did it
            await self._call("DELETE", self._path)

    async def _call(self, method: str, path: str, may_have_ended: bool = False) -> _Response | None:
        """The answer; None for one that says that it has ended. Raises _LostError, RefusedError."""
        while True:
            try:
                status, body = await self._exchange(method, path, b"", None)
            except (AnswerError, OSError):
                await asyncio.sleep(_RETRY_PAUSE_S)
                continue
            if status == 400 and may_have_ended and b"it has ended" in body:
                return None
            return msgspec.json.decode(_check(status, body), type=_Response)

    async def _read(self, method: str, path: str, body: bytes, num_pieces: int | None) -> None:
        """Take events until the last, or until so many more pieces have come."""
        most = None if num_pieces is None else len(self._record.piece_times) + num_pieces
        _check(*await self._exchange(method, path, body, EventParser(), most))

    async def _exchange(
        self, method: str, path: str, body: bytes, events: EventParser | None, most: int | None = None
    ) -> tuple[int, bytes]:
        """Status and body. Raises AnswerError or OSError for what may be tried again."""
        request, whole, last_status = self._endpoint.encode_request(method, path, body), b"", 0
        parts = read_answer(self._endpoint, request, self._tls, _READ_BYTES, self._pause_s)
        async with contextlib.aclosing(parts) as answer:
            async for status, data in answer:
                last_status = status
                if events is None or status != 200:
                    whole += data
                    continue
                for event in events.feed(data):
                    self._take(msgspec.json.decode(event, type=_Event))
                if self._ended is not None or (most is not None and len(self._record.piece_times) >= most):
                    return 200, b""
        if events is not None and last_status == 200:
            raise AnswerError("the stream ended without its last event")
        return last_status, whole

    def _take(self, event: _Event) -> None:
        if event.type == "error":
            raise AnswerError(event.message)
        if event.sequence_number != self._next:
            raise RefusedError(f"event {event.sequence_number} came in place of {self._next}")
        self._next += 1
        if event.type == "response.created":
            self._begun = event.response
        elif event.type in _ENDS:
            self._ended = event.response
        elif event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
            if event.type == "response.output_text.delta":
                self._message.content += event.delta
            else:
                self._message.reasoning += event.delta
            self._record.text = join_message(self._message)
            self._record.piece_times.append(time.monotonic())


def _check(status: int, body: bytes) -> bytes:
    if status == 404:
        raise _LostError("not found")
    if status != 200:
        raise RefusedError(f"HTTP {status}: {body[:_MAX_TEXT].decode(errors='replace')}")
    return body


def _join(response: _Response) -> str:
    """All of its text, as a record has it."""
    message = AssistantMessage()
    for item in response.output:
        text = "".join(part.text for part in item.content)
        if item.type == "reasoning":
            message.reasoning += text
        else:
            message.content += text
    return join_message(message)
