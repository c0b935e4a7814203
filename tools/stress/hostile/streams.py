"""Attacks by connections: bytes without end, bodies that never come, silence, what hides behind an upgrade.

Most of them have no key. All are counted as `wire` says.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from .attack import REFUSALS, Attack
from .wire import Exchange, connect, converse, make_head, make_request

_PATH = "/v1/completions"
_PIECE_BYTES = 64 * 1024
_ENDLESS_BYTES = 64 * 1024 * 1024  # of a stream that is to be refused long before
_BODY_BYTES = 8 * 1024 * 1024  # the largest that is let in by default
_CHUNKED = "Transfer-Encoding: chunked"
_JSON = "Content-Type: application/json"
_DRIP_S = 0.5  # between two bytes of a slow client
_QUIET_S = 0.3  # after which no second answer comes


class Endless(Attack):
    """Four connections, one with the attackers' key, each a beginning and then the same piece without end."""

    allowed = frozenset({"400", "401", "408", "413", "414", "431", "cut", "open", "not accepted"})
    headers: tuple[str, ...] = (_JSON, _CHUNKED)
    path = _PATH
    beginning: bytes = b""
    unit: bytes  # what is repeated

    def play(self, until: float) -> Counter[str]:
        keys = (None, None, "wrong", self.target.api_key)
        return converse(self.target, [self._make_exchange(key) for key in keys], until)

    def _make_exchange(self, key: str | None) -> Exchange:
        piece = self.unit * (_PIECE_BYTES // len(self.unit))
        pieces = itertools.repeat(piece, _ENDLESS_BYTES // len(piece))
        return Exchange(itertools.chain([self._make_head(key)], pieces), is_endless=True)

    def _make_head(self, key: str | None) -> bytes:
        return make_head(self.target, self.path, self.headers, key) + b"\r\n" + self.beginning


class EndlessTrailer(Endless):
    """One trailer field behind a chunked body."""

    beginning, unit = b"2\r\n{}\r\n0\r\nX-T: ", b"a"


class EndlessTrailers(Endless):
    """Trailer fields without number."""

    beginning, unit = b"2\r\n{}\r\n0\r\n", b"X-T: a\r\n"


class EndlessExtension(Endless):
    """One chunk's extension."""

    beginning, unit = b"5;x=", b"a"


class EndlessChunks(Endless):
    """Chunks of one byte, up to the largest body and on."""

    unit = b"1\r\nx\r\n"


class EndlessHeader(Endless):
    """One header."""

    unit = b"a"

    def _make_head(self, key: str | None) -> bytes:
        return make_head(self.target, self.path, (), key) + b"X-H: "


class EndlessHeaders(EndlessHeader):
    """Headers without number."""

    unit = b"X-H: a\r\n"

    def _make_head(self, key: str | None) -> bytes:
        return make_head(self.target, self.path, (), key)


class EndlessLine(EndlessHeader):
    """A request line."""

    def _make_head(self, key: str | None) -> bytes:  # noqa: ARG002 - no header comes so far
        return b"POST /"


class StrangersBodies(Attack):
    """The largest bodies from callers without a right key, who are to be told so before they have sent it."""

    allowed = frozenset({"401", "429", "503", "cut", "open", "not accepted"})

    def play(self, until: float) -> Counter[str]:
        def make(key: str | None) -> Exchange:
            head = make_head(self.target, _PATH, (_JSON, f"Content-Length: {_BODY_BYTES}"), key) + b"\r\n"
            return Exchange(itertools.chain([head], _fill(_BODY_BYTES)), is_endless=True)

        num_each = self.target.shrink(8)
        return converse(self.target, [make(key) for key in (None, "wrong") for _ in range(num_each)], until)


class UnfinishedBodies(Attack):
    """150 largest bodies with a right key, all but for their last byte."""

    allowed = REFUSALS | {"cut", "open", "not accepted"}

    def play(self, until: float) -> Counter[str]:
        head = make_head(self.target, _PATH, (_JSON, f"Content-Length: {_BODY_BYTES}"), self.target.api_key)
        pieces = [head + b"\r\n", *_fill(_BODY_BYTES - 1)]
        return converse(self.target, _repeat(pieces, self.target.shrink(150)), until)


class Silence(Attack):
    """More connections than the server's processes have descriptors, which say nothing."""

    allowed = frozenset({"408", "503", "cut", "open", "not accepted"})

    def play(self, until: float) -> Counter[str]:
        return converse(self.target, _repeat([], self.target.shrink(2500)), until)


class SlowHeads(Attack):
    """Heads that come a byte at a time."""

    allowed = REFUSALS | {"401", "cut", "open", "not accepted"}

    def play(self, until: float) -> Counter[str]:
        head = make_head(self.target, _PATH, (_JSON,), None)
        return converse(self.target, _repeat(_drip(head), self.target.shrink(200), _DRIP_S), until)


class SlowBodies(Attack):
    """Bodies with a right key that come a byte at a time."""

    allowed = REFUSALS | {"cut", "open", "not accepted"}

    def play(self, until: float) -> Counter[str]:
        request = make_request(self.target, _PATH, b" " * 1000)
        pieces = [request[:-1000], *_drip(request[-1000:])]
        return converse(self.target, _repeat(pieces, self.target.shrink(200), _DRIP_S), until)


class SlowReaders(Attack):
    """Streams that nobody reads."""

    allowed = REFUSALS | {"cut", "open", "not accepted"}

    def play(self, until: float) -> Counter[str]:
        body = {
            "model": self.target.model,
            "prompt": "Nobody reads this",
            "n": 8,
            "max_tokens": 1500,
            "ignore_eos": True,
            "logprobs": 5,
            "stream": True,
        }
        request = make_request(self.target, _PATH, msgspec.json.encode(body))
        crowd = [Exchange([request], reads=False) for _ in range(self.target.shrink(24))]
        return converse(self.target, crowd, until)


class Upgrade(Attack):
    """A body in a second segment behind `Upgrade: h2c`: it is a body, and no request of its own.

    Besides statuses: 'smuggled', when two answers come; 'wrong 400', 'wrong 200' when the body was not read.
    """

    allowed = frozenset({"200", "400", "429", "503", "cut", "open", "not accepted"})

    def play(self, until: float) -> Counter[str]:
        honest = {"model": self.target.model, "prompt": "Hello", "max_tokens": 1}
        answers = Counter([self._ask(msgspec.json.encode(honest), "400", until)])
        return answers + Counter([self._ask(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "200", until)])

    def _ask(self, body: bytes, wrong_status: str, until: float) -> str:
        headers = (
            "Connection: Upgrade, HTTP2-Settings",
            "Upgrade: h2c",
            "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
            _JSON,
            f"Content-Length: {len(body)}",
        )
        head = make_head(self.target, _PATH, headers, self.target.api_key) + b"\r\n"
        try:
            with connect(self.target) as connection:
                connection.sendall(head)
                time.sleep(0.01)  # a segment of its own
                connection.sendall(body)
                said = _read_until_quiet(connection, until)
        except OSError:
            return "cut"
        statuses = [part[1:4].decode() for part in said.split(b"HTTP/1.1")[1:]]
        if len(statuses) != 1:
            return "smuggled" if statuses else "open"
        return f"wrong {wrong_status}" if statuses[0] == wrong_status else statuses[0]


def _fill(size: int) -> Iterator[bytes]:
    """That many bytes in large pieces, which are one in memory."""
    piece = b'{"prompt": "' + b"a" * (1024 * 1024)
    yield from itertools.repeat(piece, size // len(piece))
    yield piece[: size % len(piece)]


def _drip(data: bytes) -> list[bytes]:
    return [data[place : place + 1] for place in range(len(data))]


def _repeat(pieces: Iterable[bytes], count: int, pause_s: float = 0.0) -> Iterator[Exchange]:
    once = list(pieces)
    return (Exchange(once, pause_s=pause_s) for _ in range(count))


def _read_until_quiet(connection: socket.socket, until: float) -> bytes:
    """What comes until the connection ends, or nothing has come for a while after the first bytes."""
    said = b""
    while (left_s := until - time.monotonic()) > 0:
        connection.settimeout(min(left_s, _QUIET_S) if said else left_s)
        try:
            data = connection.recv(65536)
        except TimeoutError:
            break
        if not data:
            break
        said += data
    return said
