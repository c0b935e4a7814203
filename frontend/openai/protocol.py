"""uvicorn's HTTP connection with caps: everything a client sends is counted as it comes, part by part.

httptools itself takes a header, a trailer or a chunk extension of any size and waits for its end for ever.
What is refused here never reaches the app; it is answered in OpenAI's error shape, and the connection ends.
The key is checked when the headers are complete; only a POST of a known caller to a route with a body has its
body stored.
"""

from __future__ import annotations

import asyncio
import socket
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn._types import HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .auth import CALLER_KEY, ApiKeys
from .errors import ApiError, encode_error, overloaded
from .limits import Limits
from .memory import MemoryTrimmer
from .parsing import BODY_EXTENSION
from .read_turns import ReadTurns
from .shares import ByteShares, ConnectionTable, name_address
from .stream import CLOSE_EXTENSION

_LINGER_S = 1.0  # a client that still sends gets this long to read why it was refused
_MAX_DROPPED_BYTES = 2**20  # that are read meanwhile; what comes then stays in the kernel
_MAX_REFUSED = 128  # connections beyond max_connections that are told so
_HEADER_OVERHEAD = 4  # ": " and the end of the line
_SLICE_BYTES = 2**14  # at most so much of another message may be counted as this one's, or not at all


class _Refused(Exception):
    """Stops the parser; the answer is on its way."""


class Admission:
    """What the connections of one process share: its limits, keys and room.

    body_paths: where a POST has a body; that of any other request is not stored.
    """

    def __init__(self, limits: Limits, keys: ApiKeys, body_paths: frozenset[str]) -> None:
        self.limits = limits
        self.keys = keys
        self.body_paths = body_paths
        self.connections: ConnectionTable[CappedProtocol] = ConnectionTable(limits.max_connections)
        self.headers: ByteShares[CappedProtocol] = ByteShares(limits.max_total_header_bytes)
        self.bodies: ByteShares[CappedProtocol] = ByteShares(
            max(limits.max_total_body_bytes, limits.max_body_bytes)
        )
        self.memory = MemoryTrimmer()
        self.read_turns = ReadTurns()


class _LateClose:
    """The transport as a request with a body sees it: answered too early, the connection closes late."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, protocol: CappedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_after_answer


class CappedProtocol(HttpToolsProtocol):
    """One connection. Made by `create_server` through a factory."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        admission: Admission,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.timeout_keep_alive = cast(int, admission.limits.max_keep_alive_s)
        self._admission = admission
        self._limits = admission.limits
        self._client_name = ""  # in shares: the address, or what the last right key hashes to
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._is_deaf = False  # what comes is dropped: it was refused, or has said that it is done
        self._is_ending = False  # the last answer has been given
        self._num_dropped_bytes = 0
        self._header_sizes: list[int] = []  # of the requests under way, in their order
        self._answered: RequestResponseCycle | None = None  # the request whose turn it is, or was last
        # The message that comes in:
        self._num_parts = 0  # heads and bodies that have begun or ended, so that a slice knows of a border
        self._is_in_head = True  # or between two messages
        self._has_begun = False
        self._is_other_protocol = False  # it is read a second time, without what asks for the other one
        self._is_after_chunk_line = False  # and none of the chunk's bytes has come: it may be a trailer
        self._stores_body = False
        self._largest_body = 0  # in bytes, of the messages since the last was answered
        self._num_header_bytes = 0  # of headers that are complete
        self._num_unfinished_bytes = 0  # of the head, complete or not, and of trailers
        self._num_body_bytes = 0
        self._num_framing_bytes = 0  # between its chunks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            # asyncio does so only for sockets made with a protocol number; without it an answer, which is
            # written as head and body, waits 40 ms for the client's delayed acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_name = name_address(self.client[0]) if self.client else ""
        self._arm(self._limits.max_keep_alive_s, None)
        victim = self._admission.connections.add(self, self._client_name)
        if victim is not self:
            if victim is not None:
                victim.close_now()
        elif len(self.connections) > self._limits.max_connections + _MAX_REFUSED:
            self.close_now()
        else:
            allowed = f"at most {self._limits.max_connections} (max_connections), and none of them is idle"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"connections: {allowed}", "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self._forget_cycle()  # uvicorn tells the last request that came only
        self._end()
        self._admission.connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        view = memoryview(data) if len(data) > _SLICE_BYTES else data
        for start in range(0, len(data), _SLICE_BYTES):
            if self._is_deaf:
                self._drop(len(data) - start)
                break
            self._take(view[start : start + _SLICE_BYTES])
        if self._is_in_head and self._has_begun:
            self._admission.connections.renew(self)
        self._hold_bytes()
        self._admission.read_turns.note_read(self, len(data))

    def pause_reading(self) -> None:
        """Others have a turn."""
        if not self.transport.is_closing():
            self.flow.pause_reading()

    def continue_reading(self) -> None:
        """Read on, unless it was stopped for good, or until earlier requests are answered."""
        is_stopped = self._num_dropped_bytes > _MAX_DROPPED_BYTES or self.pipeline
        if not (is_stopped or self.transport.is_closing()):
            self.flow.resume_reading()

    def _take(self, data: bytes | memoryview) -> None:
        """Parse a slice of what has come, and count it: as body, as header, or as what is between chunks."""
        num_parts, num_body_bytes = self._num_parts, self._num_body_bytes
        was_after_chunk_line = self._is_after_chunk_line
        if not self._parse(data) or self._is_deaf:
            return
        if num_parts != self._num_parts:  # a border is somewhere in it
            self._num_unfinished_bytes = len(data) if self._has_begun and self._is_in_head else 0
            return
        num_new_bytes = len(data) - (self._num_body_bytes - num_body_bytes)
        if self._is_in_head or (was_after_chunk_line and self._is_after_chunk_line):
            self._num_unfinished_bytes += num_new_bytes
            if self._num_unfinished_bytes > self._limits.max_header_bytes:
                self._refuse_header_bytes(self._num_unfinished_bytes)
        else:
            self._num_framing_bytes += num_new_bytes
            self._check_body_bytes()

    def _parse(self, data: bytes | memoryview) -> bool:
        """False when the connection has been refused."""
        parser = self.parser
        assert parser is not None, "no data comes after connection_lost"
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._parse_again(data[cast(int, upgrade.args[0]) :])
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                self._refuse(HTTPStatus.BAD_REQUEST, f"request: valid HTTP/1.1 ({error})", "invalid_http")
            return False
        return True

    def _parse_again(self, rest: bytes | memoryview) -> bool:
        """A head that asks for another protocol without that wish, and what follows it as its body.

        httptools would take the body for a request: what a client says in its own body is no request.
        """
        self._is_other_protocol = False
        parser = self.parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return self._parse(b"\r\n".join([*lines, b"", b""])) and (not rest or self._parse(rest))

    def on_message_begin(self) -> None:
        now = int(time.time())
        if now != getattr(self.server_state, "date", None):
            self.server_state.date = now  # type: ignore[attr-defined]
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]
        self._unset_keepalive_if_required()
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope["extensions"] = {CLOSE_EXTENSION: self.close_now, BODY_EXTENSION: self._hold_bytes}
        self._num_parts += 1
        self._has_begun = True
        self._is_after_chunk_line = self._stores_body = False
        self._num_header_bytes = self._num_body_bytes = self._num_framing_bytes = 0
        self._arm(self._limits.max_header_s, "header")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer: it could be anything that is checked in headers, and comes after the check
        self._count_header_bytes(len(name) + len(value) + _HEADER_OVERHEAD)
        if len(self.headers) >= self._limits.max_headers:
            allowed = f"at most {self._limits.max_headers} (max_headers)"
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: {allowed}", "too_many_headers"
            )
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._note_other_protocol()
            return
        self._num_parts += 1
        self._is_in_head = False
        self._num_unfinished_bytes = 0
        self._disarm()
        if len(self.pipeline) >= self._limits.max_pipelined:
            allowed = f"at most {self._limits.max_pipelined} (max_pipelined)"
            self._answer_and_end(overloaded(f"requests that wait for an answer: {allowed}"))
            raise _Refused
        caller = self._admission.keys.identify(self.headers)
        num_bytes = _read_body_length(self.headers)
        if caller is not None:
            cast(dict[str, Any], self.scope)["state"][CALLER_KEY] = caller
            self._client_name = caller.key_hash or self._client_name
            self._admission.connections.note_busy(self, self._client_name)
            if num_bytes is not None and num_bytes > self._limits.max_body_bytes:
                self._refuse_body(num_bytes)
                raise _Refused
        super().on_headers_complete()
        self._header_sizes.append(self._num_header_bytes)
        if num_bytes != 0:
            self._expect_body(self.cycle, is_known=caller is not None)

    def _note_other_protocol(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            text = "method=CONNECT: this server is no proxy"
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, text, "method_not_allowed")
            raise _Refused
        self._is_other_protocol = True

    def _expect_body(self, cycle: RequestResponseCycle, is_known: bool) -> None:
        scope = cycle.scope
        self._stores_body = (
            is_known and scope["method"] == "POST" and scope["path"] in self._admission.body_paths
        )
        cycle.transport = cast(asyncio.Transport, _LateClose(self))
        if not self._stores_body:
            cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        """The line with a chunk's size is complete."""
        self._is_after_chunk_line = True

    def on_body(self, body: bytes) -> None:
        """Stored until it is complete: the app has nothing to do with half a JSON text."""
        self._is_after_chunk_line = False
        self._num_body_bytes += len(body)
        if self._stores_body:
            self.cycle.body += body
            self._largest_body = max(self._largest_body, self._num_body_bytes)

    def on_message_complete(self) -> None:
        if self._is_other_protocol:
            return
        self._check_body_bytes()
        if self._is_deaf:
            raise _Refused
        self._disarm()
        self._num_parts += 1
        self._is_in_head = True
        self._has_begun = False
        self._is_deaf = not self.cycle.keep_alive
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle  # `self.cycle` is the last that came
        super()._start_asgi_task(cycle, app)
        if cycle.more_body:
            self._arm(self._limits.max_body_s, "body")

    def on_response_complete(self) -> None:
        if self._is_ending:
            self.server_state.total_requests += 1
            return
        self._header_sizes.pop(0)
        if self._is_unread:
            self.close_after_answer()
            return
        super().on_response_complete()
        if not self.is_busy:
            self._forget_request()
        self._hold_bytes()
        if self.transport.is_closing():  # when its last bytes have gone, which takes a reader that reads
            self._arm(self._limits.write_timeout_s, None)
        elif not self.is_busy:
            self._admission.connections.note_idle(self)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing has come for a while; what the client has not read by now it does not want."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """The client does not read: whoever waits to write more does so for a bounded time."""
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self._limits.write_timeout_s, self._on_write_deadline)

    def resume_writing(self) -> None:
        """The client has read."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    def _on_write_deadline(self) -> None:
        if self.is_busy:
            self.close_now()

    def _count_header_bytes(self, size: int) -> None:
        self._num_header_bytes += size
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refuse_header_bytes(self._num_header_bytes)
            raise _Refused

    def _check_body_bytes(self) -> None:
        size = self._num_body_bytes + self._num_framing_bytes
        if size > self._limits.max_body_bytes:
            self._refuse_body(size)

    def _hold_bytes(self) -> None:
        """Note what is stored of this connection's requests, and make room when it is too much for all."""
        if self._is_ending:
            return
        num_header_bytes = sum(self._header_sizes) + self._num_unfinished_bytes
        self._hold_share(self._admission.headers, num_header_bytes, "headers", "max_total_header_bytes")
        if self.pipeline:
            num_body_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        else:
            num_body_bytes = 0 if self._answered is None else len(self._answered.body)
        self._hold_share(self._admission.bodies, num_body_bytes, "bodies", "max_total_body_bytes")

    def _hold_share(self, shares: ByteShares[CappedProtocol], num_bytes: int, what: str, limit: str) -> None:
        while not self._is_ending and shares.hold(self, self._client_name, num_bytes):
            victim = shares.find_victim(self, self._client_name)
            held = f"{shares.num_bytes} bytes under way, {shares.count_of(victim._client_name)} of them yours"
            victim._answer_and_end(overloaded(f"{what}: {held}, at most {shares.max_bytes} ({limit})"))

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > _MAX_DROPPED_BYTES:
            self.flow.pause_reading()

    def _refuse_header_bytes(self, size: int) -> None:
        text = f"headers={size} bytes: at most {self._limits.max_header_bytes} (max_header_bytes)"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, "headers_too_large")

    def _refuse_body(self, size: int) -> None:
        text = f"body={size} bytes: at most {self._limits.max_body_bytes} (max_body_bytes)"
        self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, "body_too_large")

    def _arm(self, delay_s: float, part: str | None) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(delay_s, self._on_deadline, part)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self, part: str | None) -> None:
        if part is None:
            self.transport.abort()
            return
        limit = self._limits.max_header_s if part == "header" else self._limits.max_body_s
        text = f"{part}: complete within {limit:g} s (max_{part}_s)"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, text, "request_timeout")

    def _refuse(self, status: HTTPStatus, text: str, code: str) -> None:
        self._answer_and_end(ApiError(status, text, code=code))

    def _answer_and_end(self, error: ApiError) -> None:
        """Answer, tell the app that the client is gone, and close after what is still being sent."""
        has_begun = self._forget_cycle()
        if has_begun:  # a response is half sent: another one would be read as part of it
            self._end()
            self.transport.close()
            self._arm(self._limits.write_timeout_s, None)
            return
        body = encode_error(error)
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {error.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | error.headers).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._linger()

    def close_after_answer(self) -> None:
        """Close; a client that is still sending what was answered gets time to read the answer."""
        if self._is_unread:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._end()
        self.flow.resume_reading()  # unread bytes at close would make the kernel drop the answer
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _end(self) -> None:
        """The last answer has been given: nothing more is read or stored, and others have the room."""
        self._is_deaf = self._is_ending = True
        self._disarm()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self._has_begun = False
        self._forget_request()
        self._admission.headers.release(self)
        self._admission.bodies.release(self)
        self._admission.connections.demote(self)

    def _forget_request(self) -> None:
        """What has been answered is not kept until the next request: its headers may be large."""
        self._admission.memory.note_ended(self._largest_body)
        self._largest_body = 0
        self.cycle = self._answered = cast(RequestResponseCycle, None)
        if not self._has_begun:
            self.headers = []
            self.scope = cast(HTTPScope, None)
            self.url = b""

    @property
    def is_busy(self) -> bool:
        """A response is under way."""
        return self._answered is not None and not self._answered.response_complete

    @property
    def _is_unread(self) -> bool:
        """The request that is being answered, or has been, has not come whole."""
        return self._answered is not None and self._answered.more_body

    def close_now(self) -> None:
        """End the connection without waiting for a reader that does not read."""
        self._forget_cycle()
        self._end()
        self.transport.abort()

    def _forget_cycle(self) -> bool:
        """Tell the running request that its client is gone; True when its response has begun."""
        self.pipeline.clear()
        cycle = self._answered
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return cycle.response_started


def _read_body_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Bytes of the body as the head says, None when they come in chunks. httptools has checked the digits."""
    num_bytes = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            num_bytes = int(value.lstrip(b"0") or b"0")  # of many digits, which int refuses, most are zeros
    return num_bytes
