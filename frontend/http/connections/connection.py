"""An HTTP/1.1 connection, which answers one request after the other.

What is refused here never reaches the app. The key is checked when the headers are complete; only a POST of a
known caller to a route with a body has its body stored. What comes behind a request is looked at when that is
answered, so that it costs it nothing. A connection ends in order, whoever ends it and whatever has been sent:
answers come whole, a refusal is told and can be read, a client that does not read is cut off, and the app
learns that its client is gone.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from ..bodies.parsing import BODY_EXTENSION
from ..caller import name_address
from ..errors import ApiError, as_api_error, encode_answer
from ..observe.access_log import CURRENT, KEY_LENGTH, AccessLog, AccessRecord
from ..stream import GONE_EXTENSION, REQUEST_ID_HEADER
from .admission import Admission
from .auth import CALLER_KEY, OPEN_PATHS
from .packing import find_coding, unpack
from .request_parser import RequestHead, RequestParser, check_body_length

_MAX_REFUSED = 128  # connections beyond max_connections that are told so
_LARGE_READ_BYTES = 2**16  # uvloop reads at most 256 KiB at once
_MAX_BEHIND_BYTES = 2**16  # of what comes behind a request; then nothing is read until that is answered
_LINGER_S = 1.0  # a client that still sends gets this long to read why it was refused
_MAX_DROPPED_BYTES = 2**20  # that are read meanwhile; what comes then stays in the kernel
_STATUS_LINES = {int(status): f"HTTP/1.1 {status:d} {status.phrase}\r\n".encode() for status in HTTPStatus}
_NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_SLASHES = re.compile(rb"/{2,}")
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
    coding: bytes = b""  # of the body, while it is packed
    record: AccessRecord | None = None  # where somebody logs it
    body: bytearray = field(default_factory=bytearray)  # as far as it has come and the app has not taken it
    packed: bytes = b""  # of it, while it is unpacked
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
        CURRENT.set(self.record)  # a request has a task, and with it a context, of its own
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
                self.connection.refuse(refusal)

    def take_body(self, piece: bytes | bytearray, is_whole: bool) -> None:
        """A piece has come. Stored until it is complete: the app has nothing to do with half a JSON text."""
        if self.stores_body:
            self.body += piece
            self.num_body_bytes += len(piece)
        if is_whole:
            self.is_whole = True
            self.has_changed.set()

    async def receive(self) -> Message:
        """The body when it is whole, then that the client is gone or has been answered."""
        if self.expects_continue and not self.connection.transport.is_closing():
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.expects_continue = False
        if not (self.is_gone or self.is_answered):
            self.connection.continue_reading()
            await self.has_changed.wait()
            self.has_changed.clear()
        if self.is_gone or self.is_answered:
            return {"type": "http.disconnect"}
        if self.coding and not await self._unpack():
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def _unpack(self) -> bool:
        """Unpack the body, in turns; False when the client is gone, or had to give way. Raises ApiErrors."""
        self.packed, self.body, coding, self.coding = bytes(self.body), bytearray(), self.coding, b""
        for piece in unpack(self.packed, coding):
            self.body += piece
            self.num_body_bytes += len(piece)
            await self.connection.hold_unpacked(len(self.body))
            if self.is_gone:
                return False
        self.packed = b""
        return True

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
        if self.record is not None:
            self.record.status = status
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
            elif name == REQUEST_ID_HEADER and self.record is not None:
                self.record.request_id = value.decode("latin-1")
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
    """One connection. It waits for a request, for its body, or for the app; each wait has a deadline."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.client: tuple[str, int] | None = None  # its address, None at a Unix socket
        self.client_name = ""  # in shares: the address, or what the last right key hashes to
        self.exchange: Exchange | None = None  # under way
        self.is_ending = False  # the last answer has been given
        self.is_reading_paused = False
        self._app = app
        self._admission = admission
        self._limits = admission.limits
        self._access_log = admission.access_log
        self._loop = asyncio.get_running_loop()
        self._scheme = "http"
        self._parser = RequestParser(self._limits)
        self._is_admitted = False  # since its handshake began
        self._on_gone: Callable[[], None] | None = None  # of the request under way
        self._last_error: ApiError | None = None  # the refusal behind the request under way
        self._num_dropped_bytes = 0
        self._expected = ""  # the part of a request that it waits for
        self._deadline: asyncio.TimerHandle | None = None  # of that
        self._write_deadline: asyncio.TimerHandle | None = None

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
            host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
            self.client = host.removeprefix("::ffff:"), port  # IPv4 on a socket for both
        self._expect("request")
        if self._is_admitted:
            if self.is_ending:  # it has lost its place meanwhile
                transport.abort()
            elif self._last_error is not None:
                self.refuse(self._last_error)
        elif not self._take_place(self.client[0] if self.client else ""):
            if len(self._admission.open_connections) > self._limits.max_connections + _MAX_REFUSED:
                self.close_now()
                return
            allowed = f"at most {self._limits.max_connections} (max_connections), and none of them is idle"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self.refuse(ApiError(status, f"connections: expected {allowed}", code="too_many_connections"))

    def begin_handshake(self, handshake: asyncio.Transport, host: str) -> bool:
        """A connection that is not encrypted yet takes its place; False: there is none.

        Then comes `connection_made` with the encrypted transport, or `connection_lost`. host: the client's.
        """
        self.transport = handshake
        self._is_admitted = self._take_place(host)
        return self._is_admitted

    async def wait_for_handshake(self) -> None:
        """Until it is this client's turn: a handshake takes a ms of processor time and more."""
        await self._admission.handshakes.wait(self.client_name)

    def refuse_plain_http(self) -> None:
        """It is going to come without encryption, and is told that it has to have it."""
        text = "request: expected HTTP over TLS, as https://; this came as plain http://"
        self._last_error = ApiError(HTTPStatus.BAD_REQUEST, text, code="tls_required")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.resume_writing()
        self._tell_gone()
        self._end()
        self._admission.open_connections.discard(self)
        self._admission.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._num_dropped_bytes += len(data)
        else:
            self._parser.feed(data)
            self._advance()
            self.hold_bytes()
        if self._has_enough:
            self._pause_reading()
        elif len(data) >= _LARGE_READ_BYTES and not self.is_ending:
            self._pause_reading()
            self._admission.wait_for_turn(self)

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
        """Answer the request under way, and close."""
        if self.exchange is not None:
            self.exchange.keeps_alive = False
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
        is_unread = self.exchange is not None and not self.exchange.is_whole
        if is_unread or self.transport.can_write_eof():
            self._linger()
        else:
            self._close_when_read()

    def refuse(self, error: ApiError) -> None:
        """Refuse the request that has come, or is coming, and close; for the app its client is gone."""
        scope = None if self.exchange is None else self.exchange.scope
        path = self._parser.target.partition(b"?")[0].decode("latin-1") if scope is None else scope["path"]
        method = self._parser.method if scope is None else scope["method"]
        if self._access_log is not None and self.exchange is None:
            record = self._make_record(method, path or "-")
            record.refuse(error.status, error.cause)
            self._access_log.note(record)
        elif self.exchange is not None and self.exchange.record is not None:
            self.exchange.record.refuse(error.status, error.cause)
        if self._tell_gone():  # a response is half sent: another one would be read as part of it
            self._close_when_read()
            return
        error_headers, body = encode_answer(error, path)
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {error.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | error_headers).items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        self.transport.write(head if method == "HEAD" else head + body)
        self._linger()

    def give_way(self, error: ApiError) -> None:
        """Let go of bytes that others need: of what waits behind the request under way, else of all."""
        if self._is_answering and self._parser.num_kept_bytes:
            self._last_error = error
            self._parser.drop()
            self._note_bytes()
        else:
            self.refuse(error)

    def tell_when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """Have the request under way told when its client is gone, or has gone; None: not any more."""
        self._on_gone = on_gone
        if on_gone is not None and self.exchange is None:
            on_gone()

    def continue_reading(self) -> None:
        """Read on, unless there is more than enough already."""
        if not self._has_enough:
            self._resume_reading()

    def note_answered(self) -> None:
        """The answer that was under way is complete: the next request's turn."""
        exchange = self.exchange
        if self.is_ending or exchange is None:
            return
        if not (exchange.is_whole and exchange.keeps_alive):
            self.close_after_answer()
            return
        self._forget_exchange()
        if self.transport.is_closing():  # when its last bytes have gone, which takes a reader that reads
            self._close_when_read()
        elif self._last_error is not None:
            self.refuse(self._last_error)
        else:
            self._admission.connections.note_idle(self)
            self._advance()
            self.hold_bytes()
            self.continue_reading()

    def hold_bytes(self) -> None:
        """Note what is stored of this connection's requests, and make room when it is too much for all."""
        if not self.is_ending:
            self._note_bytes()
            self._admission.make_room(self)

    async def hold_unpacked(self, num_bytes: int) -> None:
        """So much of the body under way is unpacked: waits for the next piece's turn. Raises ApiErrors."""
        check_body_length(num_bytes, self._limits)
        self.hold_bytes()
        if not self.is_ending:
            await self._admission.unpackings.wait(self.client_name)

    # What these have in common.

    @property
    def _is_answering(self) -> bool:
        """A request has come whole: what comes now is behind it."""
        return self.exchange is not None and self.exchange.is_whole

    @property
    def _is_deaf(self) -> bool:
        """What comes is dropped: it was refused, or is behind the last request."""
        exchange = self.exchange
        is_last = exchange is not None and exchange.is_whole and not exchange.keeps_alive
        return self.is_ending or is_last or self._last_error is not None

    @property
    def _has_enough(self) -> bool:
        is_far_ahead = self._is_answering and self._parser.num_kept_bytes > _MAX_BEHIND_BYTES
        return is_far_ahead or self._num_dropped_bytes > _MAX_DROPPED_BYTES

    def _note_bytes(self) -> None:
        exchange, num_kept_bytes = self.exchange, self._parser.num_kept_bytes
        if exchange is None:
            self._admission.hold(self, num_kept_bytes, 0)
        else:
            num_body_bytes = len(exchange.body) + len(exchange.packed)
            self._admission.hold(self, exchange.num_header_bytes + num_kept_bytes, num_body_bytes)

    def _take_place(self, host: str) -> bool:
        self.client_name = name_address(host)
        return self._admission.take_place(self)

    def _advance(self) -> None:
        """Take what has come of a request, unless an earlier one is being answered."""
        try:
            if self.exchange is None:
                head = self._parser.take_head()
                if head is not None:
                    self._begin(head)
                elif self._parser.num_kept_bytes:
                    self._expect("header")
                else:
                    self._expect("request")
            exchange = self.exchange
            if exchange is not None and not exchange.is_whole:
                exchange.take_body(*self._parser.take_body())
                self._expect("" if exchange.is_whole else "body")
        except ApiError as error:
            self.refuse(error)

    def _begin(self, head: RequestHead) -> None:
        """Have a request answered whose head has come, and maybe nothing of its body. Raises ApiErrors."""
        admission = self._admission
        scope = self._make_scope(head)
        if admission.hosts is not None and scope["path"] not in OPEN_PATHS:
            admission.hosts.check(head.headers)
        caller = admission.keys.identify(head.headers)
        if caller is not None:
            self.client_name = caller.key_hash or self.client_name
            admission.connections.note_busy(self, self.client_name)
            check_body_length(head.body_bytes or 0, self._limits)
            scope["state"][CALLER_KEY] = caller
        has_body = head.body_bytes != 0
        is_post = head.method == "POST" and scope["path"] in admission.body_paths
        stores_body = has_body and is_post and caller is not None
        coding = find_coding(head.headers) if stores_body else b""
        exchange = self.exchange = Exchange(
            self,
            scope,
            num_header_bytes=head.num_bytes,
            keeps_alive=head.keeps_alive and stores_body == has_body,
            expects_continue=head.expects_continue,
            stores_body=stores_body,
            coding=coding,
        )
        if self._access_log is not None:
            record = exchange.record = self._make_record(head.method, scope["path"])
            record.key = caller.key_hash[:KEY_LENGTH] if caller is not None else ""
        admission.beginnings.add(self.client_name, functools.partial(self._run, exchange))

    def _run(self, exchange: Exchange) -> bool:
        """Have the app answer a request, whose client may be gone by now: then False."""
        record, log = exchange.record, self._access_log
        if exchange.is_gone:
            if record is not None and log is not None:
                log.note(record)
        elif record is not None and log is not None:
            self._admission.run(self._run_logged(exchange, record, log))
        else:
            self._admission.run(exchange.run(self._app))
        return not exchange.is_gone

    async def _run_logged(self, exchange: Exchange, record: AccessRecord, log: AccessLog) -> None:
        try:
            await exchange.run(self._app)
        finally:
            log.note(record)

    def _make_record(self, method: str, path: str) -> AccessRecord:
        return AccessRecord(method, path, self.client[0] if self.client else "")

    def _make_scope(self, head: RequestHead) -> dict[str, Any]:
        raw_path, _, query = head.target.partition(b"?")
        raw_path = remove_root(tidy_path(raw_path), self._admission.root_path)
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.http_version,
            "method": head.method,
            "scheme": self._scheme,
            "client": self.client,
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": head.headers,
            "state": {},
            # None of them the exchange's own: it would hold itself until the collector comes.
            "extensions": {BODY_EXTENSION: self.hold_bytes, GONE_EXTENSION: self.tell_when_gone},
        }

    def _expect(self, part: str) -> None:
        """Give the client its time for a part of a request, which goes on when it has begun; '': for none."""
        if part == self._expected:
            return
        self._expected = part
        match part:
            case "request":
                self._arm(self._limits.max_keep_alive_s, self.transport.abort)
            case "header":
                self._admission.connections.renew(self)
                self._arm(self._limits.max_header_s, self._refuse_as_late, part, self._limits.max_header_s)
            case "body":
                self._arm(self._limits.max_body_s, self._refuse_as_late, part, self._limits.max_body_s)
            case _:
                self._disarm()

    def _refuse_as_late(self, part: str, max_s: float) -> None:
        text = f"{part}: expected complete within {max_s:g} s (max_{part}_s)"
        self.refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="request_timeout"))

    def _on_write_deadline(self) -> None:
        if self.exchange is not None:
            self.close_now()

    def _arm(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._disarm()
        self._deadline = self._loop.call_later(delay_s, act, *arguments)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _pause_reading(self) -> None:
        if not (self.is_reading_paused or self.transport.is_closing()):
            self.is_reading_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self.is_reading_paused and not self.transport.is_closing():
            self.is_reading_paused = False
            self.transport.resume_reading()

    def _tell_gone(self) -> bool:
        """Tell the request under way that its client is gone; True when its response has begun."""
        exchange = self.exchange
        if exchange is None:
            return False
        self._forget_exchange()
        exchange.is_gone = True
        exchange.has_changed.set()
        if self._on_gone is not None:
            self._on_gone()
        return exchange.has_begun

    def _forget_exchange(self) -> None:
        if self.exchange is not None:
            self._admission.note_ended(self.exchange.num_body_bytes)
        self.exchange = None

    def _linger(self) -> None:
        self._end()
        self._resume_reading()  # unread bytes at close would make the kernel drop the answer
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
        self.is_ending = True
        self._last_error = None
        self._disarm()
        self._forget_exchange()
        self._parser.drop()
        self._admission.release(self)


def tidy_path(path: bytes) -> bytes:
    """A path with one slash where there are several, and none at its end: clients join URLs so."""
    return (_SLASHES.sub(b"/", path) if b"//" in path else path).rstrip(b"/") or b"/"


def remove_root(path: bytes, root_path: bytes) -> bytes:
    """A path without what a proxy has put before it; one that it has already taken away stays as it is."""
    rest = path.removeprefix(root_path)
    if not root_path or rest is path or rest[:1] not in (b"", b"/"):
        return path
    return rest or b"/"


@functools.lru_cache(1)
def _make_date(now: int) -> bytes:
    return b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
