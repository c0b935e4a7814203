"""uvicorn's HTTP connection with caps: bytes, number and time of headers, bytes and time of bodies.

httptools itself takes a header of any size and waits for its end for ever. What is refused here never
reaches the app; it is answered in OpenAI's error shape, and the connection ends.
"""

from __future__ import annotations

import asyncio
import socket
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from .errors import ApiError, encode_error
from .limits import Limits
from .stream import CLOSE_EXTENSION

_LINGER_S = 1.0  # a client that still sends gets this long to read why it was refused
_HEADER_OVERHEAD = 4  # ": " and the end of the line


class _Refused(Exception):
    """Stops the parser; the answer is on its way."""


class CappedProtocol(HttpToolsProtocol):
    """One connection. Made by `create_server` through a factory."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._has_refused = False
        self._num_messages = 0
        self._num_header_bytes = 0  # of headers that are complete
        self._num_unfinished_bytes = 0  # received since the head began, complete or not
        self._num_body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            # asyncio does so only for sockets made with a protocol number; without it an answer, which is
            # written as head and body, waits 40 ms for the client's delayed acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arm(self._limits.max_keep_alive_s, None)
        if len(self.connections) > self._limits.max_connections:
            allowed = f"at most {self._limits.max_connections} (max_connections)"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"connections: {allowed}", "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._has_refused:
            return
        self._unset_keepalive_if_required()
        num_before = self._num_messages
        parser = self.parser
        assert parser is not None, "no data comes after connection_lost"
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to nothing that Quire speaks: the request is answered as it stands
        except httptools.HttpParserError as error:
            if not self._has_refused:
                self._refuse(HTTPStatus.BAD_REQUEST, f"request: valid HTTP/1.1 ({error})", "invalid_http")
            return
        if self._is_in_head:
            is_same = num_before == self._num_messages
            self._num_unfinished_bytes = self._num_unfinished_bytes + len(data) if is_same else 0
            if self._num_unfinished_bytes > self._limits.max_header_bytes:
                self._refuse_header_bytes(self._num_unfinished_bytes)

    def on_message_begin(self) -> None:
        now = int(time.time())
        if now != getattr(self.server_state, "date", None):
            self.server_state.date = now  # type: ignore[attr-defined]
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope["extensions"] = {CLOSE_EXTENSION: self.close_now}
        self._is_in_head = True
        self._num_messages += 1
        self._num_header_bytes = self._num_body_bytes = 0
        self._arm(self._limits.max_header_s, "header")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value) + _HEADER_OVERHEAD)
        if len(self.headers) >= self._limits.max_headers:
            allowed = f"at most {self._limits.max_headers} (max_headers)"
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers: {allowed}", "too_many_headers"
            )
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._arm(self._limits.max_body_s, "body")
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(length) > self._limits.max_body_bytes:
            self._refuse_body(int(length))
            raise _Refused
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._limits.max_body_bytes:
            self._refuse_body(self._num_body_bytes)
            raise _Refused
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():  # when its last bytes have gone, which takes a reader that reads
            self._arm(self._limits.write_timeout_s, None)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing has come for a while; what the client has not read by now it does not want."""
        self.transport.abort()

    def _count_header_bytes(self, size: int) -> None:
        self._num_header_bytes += size
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._refuse_header_bytes(self._num_header_bytes)
            raise _Refused

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
        """Answer, tell the app that the client is gone, and close after what is still being sent."""
        self._has_refused = True
        self._disarm()
        self._unset_keepalive_if_required()
        has_begun = self._forget_cycle()
        if has_begun:  # a response is half sent: another one would be read as part of it
            self.transport.close()
            return
        body = encode_error(ApiError(status, text, code=code))
        head = (
            f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.flow.resume_reading()  # unread bytes at close would make the kernel drop the answer
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(_LINGER_S, self.transport.close)

    @property
    def is_busy(self) -> bool:
        """A response is under way."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def close_now(self) -> None:
        """End the connection without waiting for a reader that does not read."""
        self._has_refused = True
        self._forget_cycle()
        self.transport.abort()

    def _forget_cycle(self) -> bool:
        """Tell the running request that its client is gone; True when its response has begun."""
        self.pipeline.clear()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return cycle.response_started
