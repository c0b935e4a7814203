"""uvicorn's HTTP connection that ends in order, whoever ends it and whatever has been sent by then.

A refusal is told and can be read, a client that does not read is cut off, and the app learns that its client
is gone. What may be sent is a subclass's to say (protocol.py).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from uvicorn._types import HTTPScope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ..errors import ApiError, encode_answer

_LINGER_S = 1.0  # a client that still sends gets this long to read why it was refused
_MAX_DROPPED_BYTES = 2**20  # that are read meanwhile; what comes then stays in the kernel


class Connection(HttpToolsProtocol):
    """One connection, which answers its requests in their order."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], write_timeout_s: float
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.url = b""  # of the request that is being read, or was last
        self._write_timeout_s = write_timeout_s
        self._deadline: asyncio.TimerHandle | None = None  # of what it waits for
        self._write_deadline: asyncio.TimerHandle | None = None
        self._is_deaf = False  # what comes is dropped: it was refused, or has said that it is done
        self.is_ending = False  # the last answer has been given
        self._last_answer = b""  # a refusal of what came behind requests that are answered before it
        self._num_dropped_bytes = 0
        self._answered: RequestResponseCycle | None = None  # the request whose turn it is, or was last
        self._on_gone: Callable[[], None] | None = None  # of that request

    @property
    def is_busy(self) -> bool:
        """A response is under way."""
        return self._answered is not None and not self._answered.response_complete

    @property
    def is_unread(self) -> bool:
        """The request that is being answered, or has been, has not come whole."""
        return self._answered is not None and self._answered.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            # asyncio does so only for sockets made with a protocol number; without it an answer, which is
            # written as head and body, waits 40 ms for the client's delayed acknowledgement.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.resume_writing()
        self._forget_cycle()  # uvicorn tells the last request that came only
        self._end()
        super().connection_lost(exc)

    def refuse(self, error: ApiError, waits: bool = True) -> None:
        """Refuse what came last and close, after the answers to requests that came whole before it.

        Where there are none, or it does not wait for them, the app is told that its client is gone.
        """
        own, body = encode_answer(error, self.url.partition(b"?")[0].decode("latin-1"))
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
        lines = [f"HTTP/1.1 {error.status} {error.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | own).items()]
        answer = "\r\n".join([*lines, "", ""]).encode() + body
        if waits and self._drop_unfinished():
            self._is_deaf, self._last_answer = True, answer
            self._disarm()
        elif self._forget_cycle():  # a response is half sent: another one would be read as part of it
            self._end()
            self.transport.close()
            self._arm(self._write_timeout_s, self.transport.abort)
        else:
            self.transport.write(answer)
            self._linger()

    def close_after_answer(self) -> None:
        """Close; a client that is still sending, whatever it is, gets time to read the answer.

        TLS waits for the client's last word by itself.
        """
        if self.is_unread or self.transport.can_write_eof():
            self._linger()
        else:
            self.transport.close()

    def close_now(self) -> None:
        """End the connection without waiting for a reader that does not read."""
        self._forget_cycle()
        self._end()
        self.transport.abort()

    def tell_when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """Have the request that is being answered told when its client is gone; None: not any more."""
        self._on_gone = on_gone
        if on_gone is None:
            return
        self.flow.resume_reading()  # else its end is not seen
        if self._answered is None or self._answered.disconnected:
            on_gone()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing has come for a while; what the client has not read by now it does not want."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """The client does not read: whoever waits to write more does so for a bounded time."""
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self._write_timeout_s, self._on_write_deadline)

    def resume_writing(self) -> None:
        """The client has read."""
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    def pause_reading(self) -> None:
        """Others have a turn: nothing is read until `continue_reading`."""
        if not self.transport.is_closing():
            self.flow.pause_reading()

    def continue_reading(self) -> None:
        """Read on, unless it was stopped for good, or until earlier requests are answered."""
        is_stopped = self._num_dropped_bytes > _MAX_DROPPED_BYTES or self.pipeline
        if not (is_stopped or self.transport.is_closing()):
            self.flow.resume_reading()

    def _on_write_deadline(self) -> None:
        if self.is_busy:
            self.close_now()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle  # `self.cycle` is the last that came
        super()._start_asgi_task(cycle, app)

    def _arm(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(delay_s, act, *arguments)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > _MAX_DROPPED_BYTES:
            self.flow.pause_reading()

    def _drop_unfinished(self) -> bool:
        """Forget a request that waits and has not come whole. True when earlier ones are to be answered."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()
        return self.is_busy and not self.is_unread

    def _linger(self) -> None:
        self._end()
        self.flow.resume_reading()  # unread bytes at close would make the kernel drop the answer
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(_LINGER_S, self._stop_lingering, self.loop.time() + self._write_timeout_s)

    def _stop_lingering(self, latest: float) -> None:
        """Cut off, but not a client that has answers to read and reads them slowly."""
        if self.transport.get_write_buffer_size() and self.loop.time() < latest:
            self._arm(_LINGER_S, self._stop_lingering, latest)
        else:
            self.transport.abort()

    def _end(self) -> None:
        """The last answer has been given: nothing more is read or stored."""
        self._is_deaf = self.is_ending = True
        self._last_answer = b""
        self._disarm()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self._forget_request(keeps_head=False)

    def _forget_request(self, keeps_head: bool) -> None:
        """What has been answered is not kept until the next request: its headers may be large.

        keeps_head: they are the next one's already.
        """
        self.cycle = self._answered = cast(RequestResponseCycle, None)
        if not keeps_head:
            self.headers = []
            self.scope = cast(HTTPScope, None)
            self.url = b""

    def _forget_cycle(self) -> bool:
        """Tell the running request that its client is gone; True when its response has begun."""
        self.pipeline.clear()
        cycle = self._answered
        if cycle is None or cycle.response_complete:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        if self._on_gone is not None:
            self._on_gone()
        return cycle.response_started
