"""The HTTP connection with caps: everything a client sends is counted as it comes, part by part.

httptools itself takes a header, a trailer or a chunk extension of any size and waits for its end for ever.
What is refused here never reaches the app. The key is checked when the headers are complete; only a POST of
a known caller to a route with a body has its body stored.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from ..bodies.parsing import BODY_EXTENSION
from ..caller import name_address
from ..errors import ApiError, overloaded
from ..observe.access_layer import note_refusal
from ..stream import CLOSE_EXTENSION, GONE_EXTENSION
from .admission import Admission
from .auth import CALLER_KEY, OPEN_PATHS
from .connection import Connection
from .heads import check_head, check_method, read_body_length, remove_root
from .message_meter import MessageMeter

_MAX_REFUSED = 128  # connections beyond max_connections that are told so
_SLICE_BYTES = 2**14  # at most so much of another message may be counted as this one's, or not at all


class _RequestTransport:
    """The transport as a request sees it: the connection closes late, for a client that is still sending.

    holds_head: the answer's head waits for the first bytes behind it, which every POST's answer writes at
    once, if only b"". Two writes are two packets: 20 us of this process, and as much of the client's.
    """

    __slots__ = ("_cycle", "_head", "_transport", "close", "is_closing")

    def __init__(self, protocol: CappedProtocol, cycle: RequestResponseCycle, holds_head: bool) -> None:
        self._transport = protocol.transport
        # Weak: a circle of the two would keep a body that was refused until the collector comes by.
        self._cycle = weakref.ref(cycle) if holds_head else None
        self._head = b""
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_after_answer

    def write(self, data: bytes) -> None:
        """Send it, now or with what follows."""
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif self._cycle is not None and _has_begun(self._cycle()):  # not "100 Continue"
            self._head, self._cycle = data, None
        else:
            self._transport.write(data)


def _has_begun(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and cycle.response_started


class Aborts(Protocol):
    """What can be cut off."""

    def abort(self) -> None:
        """Cut it off."""


class CappedProtocol(Connection):
    """One connection. Made by `create_server` through a factory."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], admission: Admission
    ) -> None:
        limits = admission.limits
        super().__init__(config, server_state, app_state, limits.write_timeout_s)
        self.timeout_keep_alive = cast(int, limits.max_keep_alive_s)
        self.client_name = ""  # in shares: the address, or what the last right key hashes to
        self._admission = admission
        self._limits = limits
        self._meter = MessageMeter(limits)
        self._header_sizes: list[int] = []  # of the requests under way, in their order
        self._is_other_protocol = False  # it is read a second time, without what asks for the other one
        self._stores_body = False
        self._is_admitted = False  # since its handshake began
        self._largest_body = 0  # in bytes, of the messages since the last was answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self._limits.max_keep_alive_s, transport.abort)
        if self._is_admitted and self.is_ending:  # it has lost its place meanwhile
            transport.abort()
            return
        if self._is_admitted:
            return
        self.client_name = name_address(self.client[0] if self.client else "")
        if self._admission.take_place(self):
            return
        if len(self.connections) > self._limits.max_connections + _MAX_REFUSED:
            self.close_now()
        else:
            allowed = f"at most {self._limits.max_connections} (max_connections), and none of them is idle"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self.refuse(ApiError(status, f"connections: {allowed}", code="too_many_connections"))

    def begin_handshake(self, handshake: Aborts, host: str) -> bool:
        """A connection that is not encrypted yet takes its place; False: there is none.

        Then comes `connection_made` with the encrypted transport, or `end_handshake`. host: the client's.
        """
        self.transport = cast(asyncio.Transport, handshake)
        self.client_name = name_address(host)
        self._is_admitted = self._admission.take_place(self)
        return self._is_admitted

    def end_handshake(self) -> None:
        """It has failed."""
        self._admission.connections.remove(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._admission.connections.remove(self)

    def refuse(self, error: ApiError, waits: bool = True) -> None:
        waits = waits and self._drop_unfinished()
        log = self._admission.access_log
        if log is not None:
            under_way = cast(Scope, self._answered.scope) if self.is_busy and self._answered else None
            method = cast(dict[str, Any], self.scope or {}).get("method", "-")
            path = self.url.partition(b"?")[0].decode("latin-1") or "-"
            client = self.client[0] if self.client else ""
            note_refusal(log, None if waits else under_way, method, path, client, error)
        super().refuse(error, waits)
        if waits:
            self._meter.drop()
            del self._header_sizes[1 + len(self.pipeline) :]
            self._hold_bytes(makes_room=False)

    def give_way(self, error: ApiError) -> None:
        """Let go of bytes that others need: of what waits behind the request being answered, else of all."""
        has_more = bool(self.pipeline) or self._meter.num_unfinished_bytes > 0
        self.pipeline.clear()
        self.refuse(error, waits=has_more)

    def data_received(self, data: bytes) -> None:
        view = memoryview(data) if len(data) > _SLICE_BYTES else data
        for start in range(0, len(data), _SLICE_BYTES):
            if self._is_deaf:
                self._drop(len(data) - start)
                break
            self._take(view[start : start + _SLICE_BYTES])
        if self._meter.has_begun and not self._is_deaf:  # not of a body that comes with its head
            self._expect_rest()
        self._hold_bytes()
        self._admission.read_turns.note_read(self, len(data))

    def _expect_rest(self) -> None:
        """Have what is still to come of a message come in time."""
        if self._meter.is_in_head:
            self._admission.connections.renew(self)
            if self._deadline is None and not self.pipeline:  # behind those nothing is read
                max_s = self._limits.max_header_s
                self._arm(max_s, self._on_deadline, "header", max_s)
        elif self.is_unread and self._deadline is None:
            self._arm(self._limits.max_body_s, self._on_deadline, "body", self._limits.max_body_s)

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
        parser = self.parser
        assert parser is not None, "no data comes after connection_lost"
        num_bytes: int | None = None  # of the head that asks for another protocol
        try:
            parser.feed_data(data)
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
        parser = self.parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._parse(b"\r\n".join([*lines, b"", b""]))
        if rest:
            self._parse(rest)

    def on_message_begin(self) -> None:
        now = int(time.time())
        if now != getattr(self.server_state, "date", None):
            self.server_state.date = now  # type: ignore[attr-defined]
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]
        self._unset_keepalive_if_required()
        super().on_message_begin()
        scope = cast(dict[str, Any], self.scope)
        scope["extensions"] = {
            CLOSE_EXTENSION: self.close_now,
            BODY_EXTENSION: self._hold_bytes,
            GONE_EXTENSION: self.tell_when_gone,
        }
        self._meter.begin()
        self._stores_body = False
        self._disarm()  # a head has a deadline if it does not come whole

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._meter.count_url(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._meter.is_in_head:
            return  # a trailer: it could be anything that is checked in headers, and comes after the check
        self._meter.count_field(name, value, len(self.headers))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            check_method(self.parser.get_method())
            self._is_other_protocol = True
            return
        self._meter.end_head()
        self._disarm()
        self.url = check_head(self.url, self.headers, self.parser.get_http_version())
        num_bytes = read_body_length(self.headers)
        if self._admission.root_path:
            self.url = remove_root(self.url, self._admission.root_path)
        hosts = self._admission.hosts
        if hosts is not None and self.url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            hosts.check(self.headers)
        if len(self.pipeline) >= self._limits.max_pipelined:
            allowed = f"at most {self._limits.max_pipelined} (max_pipelined)"
            raise overloaded(f"requests that wait for an answer: {allowed}")
        caller = self._admission.keys.identify(self.headers)
        if caller is not None:
            cast(dict[str, Any], self.scope)["state"][CALLER_KEY] = caller
            self.client_name = caller.key_hash or self.client_name
            self._admission.connections.note_busy(self, self.client_name)
            self._meter.check_body_length(num_bytes or 0)
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # its client would take "100 Continue" for the answer
        super().on_headers_complete()
        self._header_sizes.append(self._meter.num_header_bytes)
        self._expect_body(self.cycle, num_bytes != 0, is_known=caller is not None)

    def _expect_body(self, cycle: RequestResponseCycle, has_body: bool, is_known: bool) -> None:
        scope = cycle.scope
        self._stores_body = (
            has_body
            and is_known
            and scope["method"] == "POST"
            and scope["path"] in self._admission.body_paths
        )
        cycle.transport = cast(asyncio.Transport, _RequestTransport(self, cycle, self._stores_body))
        if has_body and not self._stores_body:
            cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        """The line with a chunk's size is complete."""
        self._meter.note_chunk_line()

    def on_body(self, body: bytes) -> None:
        """Stored until it is complete: the app has nothing to do with half a JSON text."""
        self._meter.count_body(len(body))
        if self._stores_body:
            self.cycle.body += body
            self._largest_body = max(self._largest_body, len(self.cycle.body))

    def on_message_complete(self) -> None:
        if self._is_other_protocol:
            return
        if self._is_deaf:  # it comes behind the last request of this connection
            raise ApiError(HTTPStatus.BAD_REQUEST, "a request behind the last one")
        self._meter.end()
        self._disarm()
        self._is_deaf = not self.cycle.keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.is_ending:
            self.server_state.total_requests += 1
            return
        self._header_sizes.pop(0)
        if self.is_unread:
            self.close_after_answer()
            return
        super().on_response_complete()
        if self._last_answer and not (self.is_busy or self.transport.is_closing()):
            self.transport.write(self._last_answer)
            self._linger()
            return
        if not self.is_busy:
            self._forget_request(keeps_head=self._meter.has_begun)
        elif self._meter.has_begun:
            self._expect_rest()
        if self._meter.has_begun:
            self._unset_keepalive_if_required()  # it is not idle
        self._hold_bytes()
        if self.transport.is_closing():  # when its last bytes have gone, which takes a reader that reads
            self._arm(self._limits.write_timeout_s, self.transport.abort)
        elif not self.is_busy:
            self._admission.connections.note_idle(self)

    def _on_deadline(self, part: str, max_s: float) -> None:
        text = f"{part}: complete within {max_s:g} s (max_{part}_s)"
        self.refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="request_timeout"))

    def _hold_bytes(self, makes_room: bool = True) -> None:
        """Note what is stored of this connection's requests, and make room when it is too much for all."""
        if self.is_ending:
            return
        if self.pipeline:
            num_body_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        else:
            num_body_bytes = 0 if self._answered is None else len(self._answered.body)
        num_header_bytes = sum(self._header_sizes) + self._meter.num_unfinished_bytes
        is_over = self._admission.note(self, num_header_bytes, num_body_bytes)
        if is_over and makes_room:
            self._admission.make_room(self)

    def _end(self) -> None:
        super()._end()
        self._admission.release(self)

    def _forget_request(self, keeps_head: bool) -> None:
        self._admission.memory.note_ended(self._largest_body)
        self._largest_body = 0
        super()._forget_request(keeps_head)
