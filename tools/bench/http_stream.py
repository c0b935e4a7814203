"""A small HTTP/1.1 client for answers that stream: one exchange a connection at a time, idle ones kept.

It exists because the client must not be what a load run measures: its cost is in docs/log.md.
The parsers (RFC 9112, and server-sent events as WHATWG HTML has them) are pure: bytes in, bytes out.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from ...ipc.errors import InputError, QuireError

_MAX_HEAD_BYTES = 64 * 1024
_MAX_SIZE_LINE_BYTES = 1024  # of a chunk's size with its extensions
_CONNECT_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0


class AnswerError(QuireError):
    """The server's answer cannot be read, or ended before it was complete."""


class AnswerParser:
    """Takes an HTTP/1.1 answer apart. `status` is None until the head has come."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.is_complete = False
        self.can_be_reused = True  # whether the connection may carry another exchange
        self._rest = b""
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the body; None: chunked, or until the connection ends

    def feed(self, data: bytes) -> bytes:
        """Take what has come; return the body's bytes that it completes. Raises AnswerError."""
        self._rest += data
        if self.status is None and not self._take_head():
            return b""
        if self._is_chunked:
            return self._take_chunks()
        body = self._rest
        if self._num_left is not None:
            body = body[: self._num_left]
            self._num_left -= len(body)
            self.is_complete = self._num_left == 0
        self._rest = b""
        return body

    def end(self) -> None:
        """The connection has ended. Raises AnswerError unless the answer may end so."""
        ends_with_connection = self.status is not None and not self._is_chunked and self._num_left is None
        if not (self.is_complete or ends_with_connection):
            place = "before" if self.status is None else "within"
            raise AnswerError(f"the connection ended {place} the answer")
        self.is_complete = True

    def _take_head(self) -> bool:
        head, separator, rest = self._rest.partition(b"\r\n\r\n")
        if not separator:
            if len(head) > _MAX_HEAD_BYTES:
                raise AnswerError(f"the answer's head has more than {_MAX_HEAD_BYTES} bytes")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise AnswerError(f"not an HTTP answer: {first[:80]!r}")
        headers = dict(map(_split_header, lines))
        self._rest = rest
        self.status = int(words[1])
        self.can_be_reused = words[0] == "HTTP/1.1" and headers.get("connection") != "close"
        self._is_chunked = headers.get("transfer-encoding") == "chunked"
        if not self._is_chunked:
            length = headers.get("content-length")
            self._num_left = int(length) if length is not None and length.isdecimal() else None
            self.can_be_reused &= self._num_left is not None
        return True

    def _take_chunks(self) -> bytes:
        data, place = self._rest, 0
        pieces: list[bytes] = []
        while True:
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                if len(data) - place > _MAX_SIZE_LINE_BYTES:
                    raise AnswerError("a chunk's size line does not end")
                break
            size = _parse_chunk_size(data[place:line_end])
            start = line_end + 2
            if size == 0:
                self.is_complete = data.startswith(b"\r\n", start) or data.find(b"\r\n\r\n", start) >= 0
                break
            if len(data) < start + size + 2:
                break
            pieces.append(data[start : start + size])
            place = start + size + 2
        self._rest = data[place:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class EventParser:
    """Takes a stream of server-sent events apart."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that `data` completes; comments and other fields are left out."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        return [text for event in events if (text := _read_event(event)) is not None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is, and what every request to it says."""

    host: str
    port: int
    is_tls: bool
    path: str  # before '/v1/...', without a slash at its end
    api_key: str | None

    @classmethod
    def parse(cls, base_url: str, api_key: str | None) -> Endpoint:
        """From 'http://host:8000' or the same with '/v1'. Raises InputError."""
        allowed = "a URL such as http://127.0.0.1:8000"
        try:
            url = urlsplit(base_url.strip())
            port = url.port
        except ValueError:
            raise InputError("base_url", base_url, allowed) from None
        has_more = url.query or url.fragment or url.username
        if url.scheme not in ("http", "https") or not url.hostname or has_more:
            raise InputError("base_url", base_url, allowed)
        if not (url.path.isascii() and url.path.isprintable()):
            raise InputError("base_url", base_url, "a path of printable ASCII characters")
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
            raise InputError("api_key", "...", "printable ASCII characters")
        is_tls = url.scheme == "https"
        path = url.path.rstrip("/").removesuffix("/v1")
        return cls(url.hostname, port or (443 if is_tls else 80), is_tls, path, api_key)

    def encode_request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A whole request; `path` begins with a slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: quire-bench",
        ]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


class AnswerReader:
    """Keeps one answer's body as it comes; those of streams take it apart instead."""

    def __init__(self) -> None:
        self.body = b""

    def take_body(self, status: int, data: bytes, now: float) -> None:  # noqa: ARG002
        """Take bytes of the body, read at `now` (time.perf_counter). Called in the order of the body."""
        self.body += data


class Connection(asyncio.Protocol):
    """One connection to a server, for one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser, self._reader = AnswerParser(), AnswerReader()
        self._done: asyncio.Future[None] | None = None
        self.has_ended = asyncio.Event()
        self.has_answered = False  # since the last `exchange` began
        self.is_open = False

    async def exchange(self, request: bytes, reader: AnswerReader) -> int:
        """Send a request, hand its answer's body to `reader`, return its status.

        Raises AnswerError when the answer cannot be read; what `reader` raises comes out too.
        """
        assert self._transport is not None, "the loop has connected it"
        assert self._done is None or self._done.done(), "one exchange at a time"
        parser = self._parser = AnswerParser()
        self._reader, self.has_answered = reader, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:  # a cancelled exchange too leaves an answer that nobody reads
            self.close()
            raise
        if not parser.can_be_reused:
            self.close()
        assert parser.status is not None, "a complete answer has a status"
        return parser.status

    def close(self) -> None:
        """Begin to end the connection; idempotent."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio.Protocol."""
        # A stream's; uvloop's own class is no asyncio.Transport by name.
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        """Of asyncio.Protocol: hands bodies to the reader; what goes wrong is raised in `exchange`."""
        now, parser, done = time.perf_counter(), self._parser, self._done
        if done is None or done.done():
            self.close()  # nothing was asked, so the server has lost its place
            return
        self.has_answered = True
        try:
            body = parser.feed(data)
            if body:
                assert parser.status is not None, "the body comes after the head"
                self._reader.take_body(parser.status, body, now)
        except Exception as error:  # whatever it is, whoever awaits the exchange must get it
            done.set_exception(error)
            return
        if parser.is_complete:
            done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio.Protocol: ends the exchange, with an error unless the answer may end so."""
        self.is_open = False
        self.has_ended.set()
        if self._done is None or self._done.done():
            return
        try:
            if exc is not None:
                raise exc
            self._parser.end()
        except Exception as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


class HttpClient:
    """Exchanges with one server over as many connections as run at a time."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: list[Connection] = []
        self._host = endpoint.host
        self._tls = ssl.create_default_context() if endpoint.is_tls else None

    async def exchange(self, request: bytes, reader: AnswerReader) -> int:
        """`request` on an idle connection or a new one; returns the status.

        Where a kept connection turns out to have ended before an answer began, a new one is tried.
        Raises AnswerError, OSError, TimeoutError.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange_on(connection, request, reader)
                except (AnswerError, OSError):
                    if connection.has_answered:
                        raise
        return await self._exchange_on(await self._connect(), request, reader)

    async def close(self) -> None:
        """End the idle connections."""
        for connection in self._idle:
            connection.close()
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            for connection in self._idle:
                await connection.has_ended.wait()
        self._idle.clear()

    async def _exchange_on(self, connection: Connection, request: bytes, reader: AnswerReader) -> int:
        status = await connection.exchange(request, reader)
        if connection.is_open:
            self._idle.append(connection)
        return status

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        server_name = self.endpoint.host if self._tls is not None else None
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            transport, connection = await loop.create_connection(
                Connection, self._host, self.endpoint.port, ssl=self._tls, server_hostname=server_name
            )
        # Looking a name up takes a thread and a millisecond, which the next connections need not wait for.
        self._host = str(transport.get_extra_info("peername")[0])
        return connection


def _split_header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip().lower()


def _parse_chunk_size(line: bytes) -> int:
    try:
        size = int(line.partition(b";")[0].strip(), 16)
    except ValueError:
        size = -1
    if size < 0:
        raise AnswerError(f"not a chunk's size: {line[:40]!r}")
    return size


def _read_event(event: bytes) -> bytes | None:
    """An event's data with its lines joined; None for one without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
