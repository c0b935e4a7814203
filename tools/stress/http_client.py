"""Asks a server for a streamed completion, as patiently as OpenAI's client: after a broken connection or a
503 (one process of several that drains, or has just been started) the request is sent again.

A request is a function of its body, so a second try gets the same tokens. Every other error status, and an
error in the stream, is final.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from ...ipc.errors import QuireError
from ..bench.http_stream import AnswerError, AnswerParser, Endpoint, EventParser
from .chats import Delta, DeltaJoiner
from .record import Record

_RETRY_PAUSE_S = 0.05  # doubled after each try
_MAX_RETRY_PAUSE_S = 0.5
_READ_BYTES = 64 * 1024
_SLOW_READ_BYTES = 512
_MAX_TEXT = 300
_UNAVAILABLE = 503


class RefusedError(QuireError):
    """The server answered, and the answer is an error."""


class _Error(msgspec.Struct):
    message: str = ""


class _Choice(msgspec.Struct):
    text: str = ""
    delta: Delta | None = None  # of a chat, in place of `text`
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Vector(msgspec.Struct):
    embedding: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    data: list[_Vector] = []
    usage: _Usage | None = None
    error: _Error | None = None


async def ask_http(
    endpoint: Endpoint,
    path: str,
    body: dict[str, Any],
    record: Record,
    leave_after: int | None,
    pause_s: float,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Fill the record. Ends when the stream has, or with the connection dropped after `leave_after` pieces.

    Tries again for as long as the caller lets it. Raises RefusedError.
    """
    pause_before_retry_s = _RETRY_PAUSE_S
    request = endpoint.encode_request("POST", path, msgspec.json.encode(body))
    limit = _SLOW_READ_BYTES if pause_s else _READ_BYTES
    while True:
        answer = _Answer(record, leave_after)
        try:
            async with contextlib.aclosing(read_answer(endpoint, request, tls, limit, pause_s)) as parts:
                await answer.read(parts)
            return
        except (AnswerError, OSError):
            record.broken_at.append(time.monotonic())
        await asyncio.sleep(pause_before_retry_s)
        pause_before_retry_s = min(2 * pause_before_retry_s, _MAX_RETRY_PAUSE_S)


def make_client_context(ca_path: str) -> ssl.SSLContext:
    """Of clients that believe this authority alone, and look at the server's name."""
    return ssl.create_default_context(cafile=ca_path)


async def open_connection(
    endpoint: Endpoint, tls: ssl.SSLContext | None, limit: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """tls: as `make_client_context` makes it; None without TLS.

    Raises OSError for what may be tried again, RefusedError for a certificate that is not believed.
    """
    try:
        return await asyncio.open_connection(endpoint.host, endpoint.port, limit=limit, ssl=tls)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(f"the server's certificate: {error.verify_message}") from None


async def read_answer(
    endpoint: Endpoint, request: bytes, tls: ssl.SSLContext | None, limit: int, pause_s: float = 0.0
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Status and bytes of the body as they come, at most `limit` of them, with a pause after each.

    Raises AnswerError (a 503 too) or OSError for what may be tried again, RefusedError.
    """
    reader, writer = await open_connection(endpoint, tls, limit)
    answer = AnswerParser()
    try:
        writer.write(request)
        while not answer.is_complete:
            data = await reader.read(limit)
            if not data:
                answer.end()
            body = answer.feed(data) if data else b""
            if answer.status == _UNAVAILABLE:
                raise AnswerError("HTTP 503")
            if answer.status is not None:
                yield answer.status, body
            if pause_s:
                await asyncio.sleep(pause_s)
    finally:
        writer.transport.abort()


class _Answer:
    """What one try has brought."""

    def __init__(self, record: Record, leave_after: int | None) -> None:
        record.piece_times, record.text, record.num_tokens, record.num_ends = [], "", 0, 0
        self._record = record
        self._leave_after = leave_after
        self._events = EventParser()
        self._whole = b""  # of an answer that is not streamed
        self._is_done = False
        self._joiner = DeltaJoiner()

    async def read(self, parts: AsyncGenerator[tuple[int, bytes], None]) -> None:
        """Raises AnswerError or OSError for what may be tried again, RefusedError."""
        record = self._record
        async for status, body in parts:
            if status != 200:
                raise RefusedError(f"HTTP {status}: {body[:_MAX_TEXT].decode(errors='replace')}")
            if not record.is_streamed:
                self._whole += body
                continue
            for event in self._events.feed(body):
                self._take(event)
            if self._leave_after is not None and len(record.piece_times) >= self._leave_after:
                record.end = "left"
                return
        if not record.is_streamed:
            self._take(self._whole)
            record.num_ends, self._is_done = 1, True
        if not self._is_done:
            raise AnswerError("the stream ended without [DONE]")
        record.end = "finished"

    def _take(self, event: bytes) -> None:
        record = self._record
        if event == b"[DONE]":
            self._is_done = True
            return
        chunk = msgspec.json.decode(event, type=_Chunk)
        if chunk.error is not None:
            raise RefusedError(f"error in the stream: {chunk.error.message[:_MAX_TEXT]}")
        if chunk.usage is not None:
            record.num_tokens = chunk.usage.completion_tokens
        record.text += "".join(vector.embedding for vector in chunk.data)
        for choice in chunk.choices:
            if choice.delta is None:
                record.text += choice.text
            else:
                record.text = self._joiner.take(choice.delta)
            record.num_ends += choice.finish_reason is not None
            record.piece_times.append(time.monotonic())
