"""Many connections that misbehave, in one thread: what each sends, piece by piece, and how it is answered.

Answers: an HTTP status; 'cut', the connection ended without one; 'echoed', an error that repeats what was
sent; 'open', none by the end of the turn; 'swallowed', one without end has sent its 64 MB, whatever it was
told, and is not cut off; 'not accepted', no connection.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ...bench.http_stream import AnswerError, AnswerParser
from .plan import Target

_CONNECT_TIMEOUT_S = 1.0
_READ_BYTES = 256 * 1024
_TICK_S = 0.05
_ANSWER_TIME_S = 2.0  # between the last byte of what is to be refused and the end of a turn, to count it
_MAX_ERROR_BYTES = 64 * 1024


class Exchange:
    """One connection. `reads`: whether it takes its answer; `is_endless`: sends on whatever it is told."""

    def __init__(
        self, pieces: Iterable[bytes], *, reads: bool = True, is_endless: bool = False, pause_s: float = 0.0
    ) -> None:
        self._reads = reads
        self.answer: str | None = None
        self._pieces: Iterator[bytes] | None = iter(pieces)  # None once all has been sent
        self._pause_s = pause_s
        self._unsent = memoryview(b"")
        self._writes_at = 0.0
        self._sent_at = 0.0
        self._is_endless = is_endless
        self._parser = AnswerParser()
        self._num_body_bytes = 0

    def wants(self, now: float) -> int:
        """Selector events: to read if it ever does, to write while there is more to send and it is time."""
        has_more = self._pieces is not None and now >= self._writes_at
        return selectors.EVENT_READ * self._reads | selectors.EVENT_WRITE * has_more

    def write(self, connection: socket.socket) -> None:
        """Send what goes without waiting."""
        assert self._pieces is not None
        if not self._unsent:
            piece = next(self._pieces, None)
            if piece is None:
                self._pieces, self._sent_at = None, time.monotonic()
                return
            self._unsent = memoryview(piece)
        try:
            self._unsent = self._unsent[connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the answer may have come before the end
            self.read(connection)
            if self.answer is None:
                self._lose()
        if self._pause_s:
            self._writes_at = time.monotonic() + self._pause_s

    def read(self, connection: socket.socket) -> None:
        """Take what has come; sets `answer` when that is complete, or will not be."""
        try:
            data = connection.recv(_READ_BYTES)
            if not data:
                self._parser.end()
            if data and not self._parser.is_complete:
                self._num_body_bytes += len(self._parser.feed(data))
        except BlockingIOError:
            return
        except (AnswerError, OSError):
            self._lose()
            return
        if self._parser.is_complete and not (data and self._is_endless):
            self.answer = self._name_answer()

    def leave(self, now: float) -> str:
        """The turn is over and there is no answer: what that is called."""
        was_swallowed = self._is_endless and self._pieces is None
        return "swallowed" if was_swallowed and now - self._sent_at > _ANSWER_TIME_S else "open"

    def _lose(self) -> None:
        """The connection has ended; an error whose end is missing was an answer, anything else was not."""
        is_error = (self._parser.status or 0) >= 400
        self.answer = self._name_answer() if is_error or self._parser.is_complete else "cut"

    def _name_answer(self) -> str:
        is_error = (self._parser.status or 0) >= 400
        is_echo = is_error and self._num_body_bytes > _MAX_ERROR_BYTES
        return "echoed" if is_echo else str(self._parser.status)


def make_head(target: Target, path: str, headers: Iterable[str], api_key: str | None) -> bytes:
    """A POST's line and headers, without the empty line at their end."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {target.host}:{target.port}", *headers]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, ""]).encode()


def make_request(target: Target, path: str, body: bytes) -> bytes:
    """A whole request with the attackers' own key."""
    headers = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    return make_head(target, path, headers, target.api_key) + b"\r\n" + body


def connect(target: Target) -> socket.socket:
    """Raises OSError."""
    connection = socket.create_connection((target.host, target.port), _CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def converse(target: Target, exchanges: Iterable[Exchange], until: float) -> Counter[str]:
    """Have all of them at once, until each is answered or the time is over."""
    answers: Counter[str] = Counter()
    with _Crowd() as crowd:
        for one in exchanges:
            if time.monotonic() >= until:
                break
            try:
                crowd.add(connect(target), one)
            except OSError:
                answers["not accepted"] += 1
                break  # and neither would the next ones be
        crowd.serve(until)
        answers += crowd.leave()
    return answers


class _Crowd:
    """Open connections and what is said on each. Leaving the block closes them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, Exchange] = {}
        self._idle: set[socket.socket] = set()  # those that wait for their next piece's time, or for nothing
        self._answers: Counter[str] = Counter()

    def __enter__(self) -> _Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            connection.close()
        self._selector.close()

    def add(self, connection: socket.socket, exchange: Exchange) -> None:
        """One that has just been made."""
        connection.setblocking(False)
        self._open[connection] = exchange
        self._idle.add(connection)

    def serve(self, until: float) -> None:
        """Send and read until the time is over or every exchange is."""
        while self._open and (now := time.monotonic()) < until:
            for connection in [one for one in self._idle if self._open[one].wants(now)]:
                self._idle.remove(connection)
                self._selector.register(connection, self._open[connection].wants(now))
            for key, events in self._selector.select(_TICK_S):
                assert isinstance(key.fileobj, socket.socket)
                self._turn(key.fileobj, key.events, events)

    def leave(self) -> Counter[str]:
        """The turn is over: every answer, of those that are still open too."""
        for one in self._open.values():
            self._answers[one.leave(time.monotonic())] += 1
        return self._answers

    def _turn(self, connection: socket.socket, wanted: int, ready: int) -> None:
        one = self._open[connection]
        if ready & selectors.EVENT_READ:
            one.read(connection)
        if ready & selectors.EVENT_WRITE and one.answer is None:
            one.write(connection)
        if one.answer is not None:
            self._selector.unregister(connection)
            self._answers[one.answer] += 1
            del self._open[connection]
            connection.close()
        elif not (wants := one.wants(time.monotonic())):
            self._selector.unregister(connection)
            self._idle.add(connection)
        elif wants != wanted:
            self._selector.modify(connection, wants)
