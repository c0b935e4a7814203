"""An HTTP/1.1 connection and its exchanges: what a client sends is counted as it comes, part by part.

httptools, which parses, takes a header, a trailer or a chunk extension of any size and waits for its end for
ever. What is refused here never reaches the app. The key is checked when the headers are complete; only a
POST of a known caller to a route with a body has its body stored. A connection ends in order, whoever ends it
and whatever has been sent by then: answers come whole, a refusal is told and can be read, a client that does
not read is cut off, and the app learns that its client is gone.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from ..bodies.parsing import BODY_EXTENSION
from ..caller import name_address
from ..errors import ApiError, as_api_error, encode_answer, overloaded
from ..observe.access_layer import note_refusal
from ..stream import CLOSE_EXTENSION, GONE_EXTENSION
from .admission import Admission
from .auth import CALLER_KEY, OPEN_PATHS
from .heads import check_head, check_method, read_body_length, remove_root
from .message_meter import MessageMeter

_MAX_REFUSED = 128  # connections beyond max_connections that are told so
_SLICE_BYTES = 2**14  # at most so much of another message may be counted as this one's, or not at all
_LINGER_S = 1.0  # a client that still sends gets this long to read why it was refused
_MAX_DROPPED_BYTES = 2**20  # that are read meanwhile; what comes then stays in the kernel
_STATUS_LINES = {int(status): f"HTTP/1.1 {status:d} {status.phrase}\r\n".encode() for status in HTTPStatus}
_NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_NO_FIELD = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")  # what would end a header's value


@dataclass(eq=False)
class Exchange:
    """One request and its answer.

    The answer's head is written with the first bytes of its body, as ASGI has it: two writes are two packets,
    20 us of this process and as much of the client's.
    """

    connection: Connection
    scope: Scope
    num_header_bytes: int
    keeps_alive: bool  # the connection stays open behind the answer
    expects_continue: bool
    stores_body: bool
    body: bytearray = field(default_factory=bytearray)  # as far as it has come and the app has not taken it
    num_body_bytes: int = 0  # of it, taken or not
    is_whole: bool = False  # the request
    is_gone: bool = False  # the client
    has_begun: bool = False  # the answer: something is written
    is_answered: bool = False
    # The request is whole, the client gone, or the answer complete.
    has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _head: bytes = b""  # of the answer, and not written
    _num_bytes_left: int | None = None  # of the answer's body; None: it has not said
    _is_chunked: bool = False  # the answer's body

    async def run(self, app: ASGIApp) -> None:
        """Have the app answer."""
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.is_answered or self.is_gone):
                raise RuntimeError("the app has not answered")
        except Exception as error:
            if self.is_gone:
                return
            refusal = as_api_error(error)
            if self.is_answered:
                return
            if self.has_begun:
                self.connection.close_after_answer()
            else:
                self.connection.refuse(refusal, waits=False)

    async def receive(self) -> Message:
        """The body when it is whole, then that the client is gone or has been answered."""
        if self.expects_continue and not self.connection.transport.is_closing():
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.expects_continue = False
        if not (self.is_gone or self.is_answered):
            self.connection.resume_reading()
            await self.has_changed.wait()
            self.has_changed.clear()
        if self.is_gone or self.is_answered:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        """Write a part of the answer; waits for a client that does not read, unless it is gone."""
        if not (self.is_gone or self.connection.can_write.is_set()):
            await self.connection.can_write.wait()
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        else:
            self._write(message.get("body", b""), message.get("more_body", False))

    def _begin(self, status: int, fields: Any) -> None:
        self.expects_continue = False
        has_no_body = self.scope["method"] == "HEAD" or status in _NO_BODY
        self._num_bytes_left = 0 if has_no_body else None
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, _make_date(int(time.time()))]
        names_close = False
        for name, value in cast("list[tuple[bytes, bytes]]", fields):
            if _NO_FIELD.search(value):
                raise ValueError(f"{name!r}: {value!r} is no value of a header")
            if name == b"content-length" and not has_no_body:
                self._num_bytes_left = int(value)
            elif name == b"connection" and value == b"close":
                names_close, self.keeps_alive = True, False
            lines.append(b"%b: %b\r\n" % (name, value))
        if not (self.keeps_alive or names_close):
            lines.append(b"connection: close\r\n")
        # A client of 1.0 reads until the connection ends (RFC 9112 6.1).
        self._is_chunked = self._num_bytes_left is None and self.scope["http_version"] != "1.0"
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def _write(self, body: bytes, has_more: bool) -> None:
        data = body
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not has_more:
                data += b"0\r\n\r\n"
        elif self.scope["method"] == "HEAD":
            data = b""
        elif self._num_bytes_left is not None:
            self._num_bytes_left -= len(body)
            if self._num_bytes_left < 0 or (self._num_bytes_left and not has_more):
                raise RuntimeError(f"content-length: {-self._num_bytes_left} bytes more were sent")
        self.connection.transport.write(self._head + data if self._head else data)
        self._head, self.has_begun = b"", True
        if not has_more:
            self.is_answered = True
            self.has_changed.set()
            self.connection.note_answered()


class Connection(asyncio.Protocol):
    """One connection, which answers its requests in their order."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.client: tuple[str, int] | None = None  # its address, None at a Unix socket
        self.client_name = ""  # in shares: the address, or what the last right key hashes to
        self.exchanges: deque[Exchange] = deque()  # not answered; the first is under way, others wait for it
        self.is_ending = False  # the last answer has been given
        self.is_reading_paused = False
        self._app = app
        self._admission = admission
        self._limits = admission.limits
        self._loop = asyncio.get_running_loop()
        self._scheme = "http"
        self._is_admitted = False  # since its handshake began
        self._is_deaf = False  # what comes is dropped: it was refused, or has said that it is done
        self._last_answer = b""  # a refusal of what came behind requests that are answered before it
        self._num_dropped_bytes = 0
        self._on_gone: Callable[[], None] | None = None  # of the request under way
        self._deadline: asyncio.TimerHandle | None = None  # of what it waits for
        self._write_deadline: asyncio.TimerHandle | None = None
        # Of the message that is being read, or was last.
        self._parser: Any = self._make_parser()
        self._meter = MessageMeter(self._limits)
        self._url = b""
        self._method = "-"
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._is_other_protocol = False  # it is read a second time, without what asks for the other one

    # Events of asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._admission.open_connections.add(self)
        self._scheme = "http" if transport.get_extra_info("sslcontext") is None else "https"
        connection = transport.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            # asyncio does so only for sockets made with a protocol number; without it an answer that is
            # written in parts waits 40 ms for the client's delayed acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.client = (transport.get_extra_info("peername") or ("", 0))[:2]
        self._arm(self._limits.max_keep_alive_s, transport.abort)
        if self._is_admitted:
            if self.is_ending:  # it has lost its place meanwhile
                transport.abort()
            return
        if self._take_place(self.client[0] if self.client else ""):
            return
        if len(self._admission.open_connections) > self._limits.max_connections + _MAX_REFUSED:
            self.close_now()
        else:
            allowed = f"at most {self._limits.max_connections} (max_connections), and none of them is idle"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self.refuse(ApiError(status, f"connections: {allowed}", code="too_many_connections"))

    def begin_handshake(self, handshake: asyncio.Transport, host: str) -> bool:
        """A connection that is not encrypted yet takes its place; False: there is none.

        Then comes `connection_made` with the encrypted transport, or `connection_lost`. host: the client's.
        """
        self.transport = handshake
        self._is_admitted = self._take_place(host)
        return self._is_admitted

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.resume_writing()
        self._tell_gone()
        self._end()
        self._parser = None
        self._admission.open_connections.discard(self)
        self._admission.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        view = memoryview(data) if len(data) > _SLICE_BYTES else data
        for start in range(0, len(data), _SLICE_BYTES):
            if self._is_deaf:
                self._drop(len(data) - start)
                break
            self._take(view[start : start + _SLICE_BYTES])
        if self._meter.has_begun and not self._is_deaf:  # not of a body that comes with its head
            self._expect_rest()
        self.hold_bytes()
        self._admission.read_turns.note_read(self, len(data))

    def pause_writing(self) -> None:
        """The client does not read: whoever waits to write more does so for a bounded time."""
        self.can_write.clear()
        if self._write_deadline is None:
            max_s = self._limits.write_timeout_s
            self._write_deadline = self._loop.call_later(max_s, self._on_write_deadline)

    def resume_writing(self) -> None:
        """The client has read."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        self.can_write.set()

    # Commands of those beside it: the server, others that need its place, and the app.

    def shutdown(self) -> None:
        """Answer what has come, and close."""
        if self.exchanges:
            self.exchanges[-1].keeps_alive = False
        else:
            self.transport.close()

    def close_now(self) -> None:
        """End the connection without waiting for a reader that does not read."""
        self._tell_gone()
        self._end()
        self.transport.abort()

    def close_after_answer(self) -> None:
        """Close; a client that is still sending, whatever it is, gets time to read the answer.

        TLS waits for the client's last word by itself.
        """
        is_unread = bool(self.exchanges) and not self.exchanges[0].is_whole
        if is_unread or self.transport.can_write_eof():
            self._linger()
        else:
            self._close_when_read()

    def refuse(self, error: ApiError, waits: bool = True) -> None:
        """Refuse what came last and close, after the answers to requests that came whole before it.

        Where there are none, or it does not wait for them, the app is told that its client is gone.
        """
        if len(self.exchanges) > 1 and not self.exchanges[-1].is_whole:
            self._forget(self.exchanges.pop())
        waits = waits and bool(self.exchanges) and self.exchanges[0].is_whole
        path = self._url.partition(b"?")[0].decode("latin-1")
        if self._admission.access_log is not None:
            under_way = self.exchanges[0].scope if self.exchanges and not waits else None
            client = self.client[0] if self.client else ""
            note_refusal(self._admission.access_log, under_way, self._method, path or "-", client, error)
        own, body = encode_answer(error, path)
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {error.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | own).items()]
        answer = "\r\n".join([*lines, "", ""]).encode() + body
        if waits:
            self._is_deaf, self._last_answer = True, answer
            self._disarm()
            self._meter.drop()
            self.hold_bytes(makes_room=False)
        elif self._tell_gone():  # a response is half sent: another one would be read as part of it
            self._close_when_read()
        else:
            self.transport.write(answer)
            self._linger()

    def give_way(self, error: ApiError) -> None:
        """Let go of bytes that others need: of what waits behind the request being answered, else of all."""
        has_more = len(self.exchanges) > 1 or self._meter.num_unfinished_bytes > 0
        while len(self.exchanges) > 1:
            self._forget(self.exchanges.pop())
        self.refuse(error, waits=has_more)

    def tell_when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """Have the request that is being answered told when its client is gone; None: not any more."""
        self._on_gone = on_gone
        if on_gone is None:
            return
        self.resume_reading()  # else its end is not seen
        if not self.exchanges:
            on_gone()

    def pause_reading(self) -> None:
        """Others have a turn: nothing is read until `continue_reading`."""
        if not (self.is_reading_paused or self.transport.is_closing()):
            self.is_reading_paused = True
            self.transport.pause_reading()

    def continue_reading(self) -> None:
        """Read on, unless it was stopped for good, or until earlier requests are answered."""
        if self._num_dropped_bytes <= _MAX_DROPPED_BYTES and len(self.exchanges) <= 1:
            self.resume_reading()

    def resume_reading(self) -> None:
        """Read on: somebody waits for what comes, or for the client's end."""
        if self.is_reading_paused and not self.transport.is_closing():
            self.is_reading_paused = False
            self.transport.resume_reading()

    def note_answered(self) -> None:
        """The answer that was under way is complete: the next one's turn."""
        if self.is_ending:
            return
        if not (self.exchanges[0].is_whole and self.exchanges[0].keeps_alive):
            self.close_after_answer()
            return
        self._forget(self.exchanges.popleft())
        if self.transport.is_closing():  # when its last bytes have gone, which takes a reader that reads
            self._close_when_read()
            return
        self.resume_reading()
        if self.exchanges:
            self._admission.run(self.exchanges[0].run(self._app))
        elif self._last_answer:
            self.transport.write(self._last_answer)
            self._linger()
            return
        if self._meter.has_begun:
            self._expect_rest()
        elif not self.exchanges:
            self._url, self._headers = b"", []  # may be large
            self._arm(self._limits.max_keep_alive_s, self.transport.abort)
        self.hold_bytes()
        if not self.exchanges:
            self._admission.connections.note_idle(self)

    def hold_bytes(self, makes_room: bool = True) -> None:
        """Note what is stored of this connection's requests, and make room when it is too much for all."""
        if self.is_ending:
            return
        num_body_bytes = sum(len(exchange.body) for exchange in self.exchanges)
        num_header_bytes = sum(exchange.num_header_bytes for exchange in self.exchanges)
        num_header_bytes += self._meter.num_unfinished_bytes
        is_over = self._admission.note(self, num_header_bytes, num_body_bytes)
        if is_over and makes_room:
            self._admission.make_room(self)

    # Events of the parser. What they raise comes out of `_parse`.

    def on_message_begin(self) -> None:
        if self._is_deaf:
            raise ApiError(HTTPStatus.BAD_REQUEST, "a request behind the last one")
        self._url, self._method, self._headers, self._expects_continue = b"", "-", [], False
        self._meter.begin()
        self._disarm()  # a head has a deadline if it does not come whole

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._meter.count_url(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._meter.is_in_head:
            return  # a trailer: it could be anything that is checked in headers, and comes after the check
        self._meter.count_field(name, value, len(self._headers))
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            check_method(self._parser.get_method())
            self._is_other_protocol = True
            return
        self._meter.end_head()
        self._disarm()
        http_version = self._parser.get_http_version()
        self._method = self._parser.get_method().decode("ascii")
        self._url = check_head(self._url, self._headers, http_version)
        num_bytes = read_body_length(self._headers)
        if self._admission.root_path:
            self._url = remove_root(self._url, self._admission.root_path)
        hosts = self._admission.hosts
        if hosts is not None and self._url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            hosts.check(self._headers)
        if len(self.exchanges) > self._limits.max_pipelined:
            allowed = f"at most {self._limits.max_pipelined} (max_pipelined)"
            raise overloaded(f"requests that wait for an answer: {allowed}")
        caller = self._admission.keys.identify(self._headers)
        if caller is not None:
            self.client_name = caller.key_hash or self.client_name
            self._admission.connections.note_busy(self, self.client_name)
            self._meter.check_body_length(num_bytes or 0)
        scope = self._make_scope(http_version)
        if caller is not None:
            scope["state"][CALLER_KEY] = caller
        has_body = num_bytes != 0
        is_post = self._method == "POST" and scope["path"] in self._admission.body_paths
        exchange = Exchange(
            self,
            scope,
            num_header_bytes=self._meter.num_header_bytes,
            keeps_alive=http_version != "1.0" and self._parser.should_keep_alive(),
            # A client of 1.0 would take "100 Continue" for the answer.
            expects_continue=self._expects_continue and http_version != "1.0",
            stores_body=has_body and is_post and caller is not None,
        )
        if has_body and not exchange.stores_body:
            exchange.keeps_alive = False
        self.exchanges.append(exchange)
        if len(self.exchanges) == 1:
            self._admission.run(exchange.run(self._app))
        else:
            self.pause_reading()

    def on_chunk_header(self) -> None:
        """The line with a chunk's size is complete."""
        self._meter.note_chunk_line()

    def on_body(self, body: bytes) -> None:
        """Stored until it is complete: the app has nothing to do with half a JSON text."""
        self._meter.count_body(len(body))
        if self.exchanges[-1].stores_body:
            self.exchanges[-1].body += body
            self.exchanges[-1].num_body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._is_other_protocol or self._is_deaf:
            return
        self._meter.end()
        self._disarm()
        exchange = self.exchanges[-1]
        self._is_deaf = not exchange.keeps_alive
        exchange.is_whole = True
        exchange.has_changed.set()

    # What these have in common.

    def _take_place(self, host: str) -> bool:
        self.client_name = name_address(host)
        return self._admission.take_place(self)

    def _take(self, data: bytes | memoryview) -> None:
        """Parse a slice of what has come, and count it: as body, as header, or as what is between chunks."""
        self._meter.begin_slice()
        try:
            self._parse(data)
            if not self._is_deaf:
                self._meter.end_slice(len(data))
        except ApiError as error:
            if not self._is_deaf:
                self.refuse(error)

    def _parse(self, data: bytes | memoryview) -> None:
        """Raises ApiError for what is no HTTP, and what a callback has raised."""
        num_bytes: int | None = None  # of the head that asks for another protocol
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            num_bytes = cast(int, upgrade.args[0])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, ApiError):
                raise error.__context__ from None
            text = f"request: valid HTTP/1.1 ({error})"
            raise ApiError(HTTPStatus.BAD_REQUEST, text, code="invalid_http") from None
        if num_bytes is not None:  # within the handler, __context__ would be the upgrade for what is raised
            self._parse_again(data[num_bytes:])

    def _parse_again(self, rest: bytes | memoryview) -> None:
        """A head that asks for another protocol without that wish, and what follows it as its body.

        httptools would take the body for a request: what a client says in its own body is no request.
        """
        self._is_other_protocol = False
        parser = self._parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
        self._parser = self._make_parser()
        self._parse(b"\r\n".join([*lines, b"", b""]))
        if rest:
            self._parse(rest)

    def _make_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # A request behind "Connection: close" is dropped here, not an error of the one before.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _make_scope(self, http_version: str) -> dict[str, Any]:
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": http_version,
            "method": self._method,
            "scheme": self._scheme,
            "client": self.client,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": {},
            "extensions": {
                CLOSE_EXTENSION: self.close_now,
                BODY_EXTENSION: self.hold_bytes,
                GONE_EXTENSION: self.tell_when_gone,
            },
        }

    def _expect_rest(self) -> None:
        """Have what is still to come of a message come in time."""
        if self._meter.is_in_head:
            self._admission.connections.renew(self)
            if self._deadline is None and len(self.exchanges) <= 1:  # behind those nothing is read
                self._expect("header", self._limits.max_header_s)
        elif self._deadline is None and self.exchanges and not self.exchanges[0].is_whole:
            self._expect("body", self._limits.max_body_s)

    def _expect(self, part: str, max_s: float) -> None:
        text = f"{part}: complete within {max_s:g} s (max_{part}_s)"
        error = ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="request_timeout")
        self._arm(max_s, self.refuse, error)

    def _on_write_deadline(self) -> None:
        if self.exchanges:
            self.close_now()

    def _arm(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._disarm()
        self._deadline = self._loop.call_later(delay_s, act, *arguments)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > _MAX_DROPPED_BYTES:
            self.pause_reading()

    def _tell_gone(self) -> bool:
        """Tell the request under way that its client is gone; True when its response has begun."""
        exchange = self.exchanges[0] if self.exchanges else None
        self._forget_all()
        if exchange is None:
            return False
        exchange.is_gone = True
        exchange.has_changed.set()
        if self._on_gone is not None:
            self._on_gone()
        return exchange.has_begun

    def _linger(self) -> None:
        self._end()
        self.resume_reading()  # unread bytes at close would make the kernel drop the answer
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(_LINGER_S, self._stop_lingering, self._loop.time() + self._limits.write_timeout_s)

    def _stop_lingering(self, latest: float) -> None:
        """Cut off, but not a client that has answers to read and reads them slowly."""
        if self.transport.get_write_buffer_size() and self._loop.time() < latest:
            self._arm(_LINGER_S, self._stop_lingering, latest)
        else:
            self.transport.abort()

    def _close_when_read(self) -> None:
        self._end()
        self.transport.close()
        self._arm(self._limits.write_timeout_s, self.transport.abort)

    def _end(self) -> None:
        """The last answer has been given: nothing more is read or stored."""
        self._is_deaf = self.is_ending = True
        self._last_answer = b""
        self._disarm()
        self._forget_all()
        self._url, self._headers = b"", []
        self._admission.release(self)

    def _forget_all(self) -> None:
        while self.exchanges:
            self._forget(self.exchanges.popleft())

    def _forget(self, exchange: Exchange) -> None:
        self._admission.memory.note_ended(exchange.num_body_bytes)


@functools.lru_cache(1)
def _make_date(now: int) -> bytes:
    return b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
