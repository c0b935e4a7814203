"""Attacks by connections: bytes without end, bodies that never come, silence, what hides behind a request.

Most of them have no key. All are counted as `wire` says.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from .attack import REFUSALS, UNANSWERED, attack
from .plan import Target
from .wire import Exchange, connect, converse, make_head, make_request

_PATH = "/v1/completions"
_PIECE_BYTES = 64 * 1024
_ENDLESS_BYTES = 64 * 1024 * 1024  # of a stream that is to be refused long before
_BODY_BYTES = 8 * 1024 * 1024  # the largest that is let in by default
_JSON = "Content-Type: application/json"
_CHUNKED = (_JSON, "Transfer-Encoding: chunked")
_DRIP_S = 0.5  # between two bytes of a slow client
_QUIET_S = 0.3  # after which no second answer comes
_BEHIND_S = 0.1  # a request is being answered by then

# What is begun, and the piece that then comes without end.
_ENDLESS: dict[str, tuple[Callable[[Target, str | None], bytes], bytes]] = {
    "endless-trailer": (lambda target, key: _chunked(target, key) + b"2\r\n{}\r\n0\r\nX-T: ", b"a"),
    "endless-trailers": (lambda target, key: _chunked(target, key) + b"2\r\n{}\r\n0\r\n", b"X-T: a\r\n"),
    "endless-extension": (lambda target, key: _chunked(target, key) + b"5;x=", b"a"),
    "endless-chunks": (lambda target, key: _chunked(target, key), b"1\r\nx\r\n"),
    "endless-header": (lambda target, key: make_head(target, _PATH, (), key) + b"X-H: ", b"a"),
    "endless-headers": (lambda target, key: make_head(target, _PATH, (), key), b"X-H: a\r\n"),
    "endless-line": (lambda _target, _key: b"POST /", b"a"),
}


def _chunked(target: Target, key: str | None) -> bytes:
    return make_head(target, _PATH, _CHUNKED, key) + b"\r\n"


def _send_without_end(
    begin: Callable[[Target, str | None], bytes],
    unit: bytes,
    target: Target,
    _rng: random.Random,
    until: float,
) -> Counter[str]:
    """Four connections, one of them with the attackers' key."""
    piece = unit * (_PIECE_BYTES // len(unit))
    pieces = itertools.repeat(piece, _ENDLESS_BYTES // len(piece))
    crowd = [
        Exchange(itertools.chain([begin(target, key)], pieces), is_endless=True)
        for key in (None, None, "wrong", target.api_key)
    ]
    return converse(target, crowd, until)


for _name, _sent in _ENDLESS.items():
    attack(_name, {"400", "401", "408", "413", "414", "431"} | UNANSWERED)(partial(_send_without_end, *_sent))


@attack("strangers-bodies", {"401", "429", "503"} | UNANSWERED)
def _send_strangers_bodies(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """The largest bodies from callers without a right key, who are to be told so before they have sent it."""

    def make(key: str | None) -> Exchange:
        return Exchange(itertools.chain([_announce(target, key)], _fill(_BODY_BYTES)), is_endless=True)

    num_each = target.shrink(8)
    return converse(target, [make(key) for key in (None, "wrong") for _ in range(num_each)], until)


@attack("unfinished-bodies", REFUSALS | UNANSWERED)
def _leave_bodies_unfinished(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """150 largest bodies with a right key, all but for their last byte."""
    pieces = [_announce(target, target.api_key), *_fill(_BODY_BYTES - 1)]
    return converse(target, _repeat(pieces, target.shrink(150)), until)


@attack("silence", {"408", "503"} | UNANSWERED)
def _say_nothing(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """More connections than the server's processes have descriptors."""
    return converse(target, _repeat([], target.shrink(2500)), until)


@attack("slow-heads", REFUSALS | UNANSWERED | {"401"})
def _drip_heads(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Heads that come a byte at a time."""
    pieces = _drip(make_head(target, _PATH, (_JSON,), None))
    return converse(target, _repeat(pieces, target.shrink(200), _DRIP_S), until)


@attack("slow-bodies", REFUSALS | UNANSWERED)
def _drip_bodies(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Bodies with a right key that come a byte at a time."""
    request = make_request(target, _PATH, b" " * 1000)
    pieces = [request[:-1000], *_drip(request[-1000:])]
    return converse(target, _repeat(pieces, target.shrink(200), _DRIP_S), until)


@attack("slow-readers", REFUSALS | UNANSWERED)
def _read_nothing(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Streams that nobody reads."""
    body = {"model": target.model, "prompt": "Nobody reads this", "n": 8, "max_tokens": 1500}
    body |= {"ignore_eos": True, "logprobs": 5, "stream": True}
    request = make_request(target, _PATH, msgspec.json.encode(body))
    crowd = [Exchange([request], reads=False) for _ in range(target.shrink(24))]
    return converse(target, crowd, until)


@attack("junk-behind", (REFUSALS - {"400", "413", "431"}) | {"200", "open", "not accepted"})
def _send_junk_behind(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """Good requests, each with something behind it, at once or 0.1 s later. A 400 is another one's answer."""
    body = {"model": target.model, "prompt": "Hello", "max_tokens": 40, "ignore_eos": True}
    request = make_request(target, _PATH, msgspec.json.encode(body))
    head = make_head(target, _PATH, _CHUNKED, target.api_key)
    behind = (
        b"junk\r\n\r\n",
        b"junk\r\n" * 2**18,
        head + b"Host: twice\r\n\r\n",
        head + b"X-H: " + b"a" * 2**17,
        head + b"\r\nzz\r\n",
        head + b"\r\n2\r\n{}\r\n0\r\nX-T: " + b"a" * 2**17,
        make_head(target, _PATH, _CHUNKED, "wrong") + b"\r\n0\r\n\r\n",
        head[:30],
    )
    crowd = [Exchange([request + data]) for data in behind]
    crowd += [Exchange([request, data], pause_s=_BEHIND_S) for data in behind]
    return converse(target, crowd, until)


@attack("upgrade", {"200", "400", "429", "503"} | UNANSWERED)
def _upgrade(target: Target, _rng: random.Random, until: float) -> Counter[str]:
    """A body in a second segment behind `Upgrade: h2c`: it is a body, and no request of its own.

    Besides statuses: 'smuggled', when two answers come; 'wrong 400', 'wrong 200' when the body was not read.
    """
    honest = msgspec.json.encode({"model": target.model, "prompt": "Hello", "max_tokens": 1})
    hidden = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    return Counter([_ask_upgraded(target, honest, "400", until), _ask_upgraded(target, hidden, "200", until)])


def _ask_upgraded(target: Target, body: bytes, wrong_status: str, until: float) -> str:
    headers = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA",
        _JSON,
        f"Content-Length: {len(body)}",
    )
    head = make_head(target, _PATH, headers, target.api_key) + b"\r\n"
    try:
        with connect(target) as connection:
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


def _announce(target: Target, key: str | None) -> bytes:
    """The head of a largest body."""
    return make_head(target, _PATH, (_JSON, f"Content-Length: {_BODY_BYTES}"), key) + b"\r\n"


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
