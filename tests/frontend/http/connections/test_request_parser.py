"""RequestParser: what is a request, what is none, and that no part of one is without an end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.frontend.http.connections import request_parser
from quire.frontend.http.connections.request_parser import RequestHead, RequestParser
from quire.frontend.http.errors import ApiError
from quire.frontend.http.limits import Limits

GOLDEN = Path(__file__).parents[3] / "golden"
LIMITS = Limits(max_header_bytes=8000, max_body_bytes=10_000, max_headers=9)
HOST = b"host: localhost\r\n"
HEAD = b"POST /tokenize HTTP/1.1\r\n" + HOST
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SIZED = HEAD + b"content-length: 5\r\n\r\n"


@dataclass
class Read:
    """A request as it was read."""

    head: RequestHead
    body: bytes = b""
    is_whole: bool = False


def read(*pieces: bytes, limits: Limits = LIMITS) -> list[Read]:
    """The requests that come in these pieces. Raises ApiError."""
    parser = RequestParser(limits)
    requests: list[Read] = []
    for piece in pieces:
        parser.feed(piece)
        while True:
            if not requests or requests[-1].is_whole:
                head = parser.take_head()
                if head is None:
                    break
                requests.append(Read(head))
            body, requests[-1].is_whole = parser.take_body()
            requests[-1].body += body
            if not requests[-1].is_whole:
                break
    return requests


def find_status(*pieces: bytes) -> int:
    """That of the refusal, 0 without one."""
    try:
        read(*pieces)
    except ApiError as error:
        return int(error.status)
    return 0


# Each with the bodies that are read of it.
GOOD: list[tuple[bytes, list[bytes]]] = [
    (b"GET /live HTTP/1.1\r\n" + HOST + b"\r\n", [b""]),
    (b"\r\n\r\nGET /live HTTP/1.1\r\n" + HOST + b"\r\n\r\n" + SIZED + b"12345", [b"", b"12345"]),
    (b"GET /live HTTP/1.0\r\n\r\n", [b""]),
    (SIZED + b"12345" + SIZED + b"GET /", [b"12345", b"GET /"]),
    (HEAD + b"content-length: " + b"0" * 5000 + b"5\r\n\r\n12345", [b"12345"]),
    (CHUNKED + b"0\r\n\r\n" + CHUNKED + b"1\r\na\r\n0\r\n\r\n", [b"", b"a"]),
    (CHUNKED + b"00A;x=\xe9 y\r\n0123456789\r\n1\r\n\r\r\n0\r\n\r\n", [b"0123456789\r"]),
    (CHUNKED + b"1\r\na\r\n0\r\nx: y\r\nz:\r\n\r\n" + SIZED + b"12345", [b"a", b"12345"]),
    (HEAD + b"connection: Upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\nGET /", [b"GET /"]),
    (HEAD + b"x:\ty\xff \r\n\r\n", [b""]),
]


@given(st.sampled_from(GOOD), st.lists(st.integers(0, 6000), max_size=6))
def test_requests_are_the_same_wherever_they_are_cut(
    case: tuple[bytes, list[bytes]], cuts: list[int]
) -> None:
    data, bodies = case
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(places) if begin < end]
    requests = read(*pieces)
    assert [(one.body, one.is_whole) for one in requests] == [(body, True) for body in bodies]
    assert [one.head for one in requests] == [one.head for one in read(data)]
    assert [one.body for one in read(*(data[i : i + 1] for i in range(len(data))))] == bodies


@pytest.mark.parametrize(("text", "status"), json.loads((GOLDEN / "bad_requests.json").read_bytes()))
def test_a_request_of_two_meanings_or_none_is_refused(text: str, status: int) -> None:
    data = text.encode("latin-1")
    assert find_status(data) == status
    assert find_status(*(data[place : place + 1] for place in range(len(data)))) == status


@pytest.mark.parametrize(
    ("begun", "more", "status"),
    [
        (b"", b"\r\n", 431),
        (b"GET /", b"y", 414),
        (b"GET /live HTTP/1.1\r\nx: ", b"y", 431),
        (b"GET /live HTTP/1.1\r\n", b"x: y\r\n", 431),
        (CHUNKED + b"0\r\nx: ", b"y", 431),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"x: y\r\n", 431),
        (CHUNKED + b"1;x=", b"y", 413),
        (CHUNKED + b"0;x=", b"y", 413),
        (CHUNKED, b"1;x=yyyyyyyyyyyyyyyyyyy\r\na\r\n", 413),
        (CHUNKED, b"1\r\na\r\n", 413),
        (CHUNKED, b"400\r\n" + b"x" * 1024 + b"\r\n", 413),
    ],
)
def test_every_part_of_a_request_has_an_end(begun: bytes, more: bytes, status: int) -> None:
    num_pieces = LIMITS.max_body_bytes // len(more) + 10
    assert find_status(begun, *[more] * num_pieces) == status
    assert find_status(begun + more * num_pieces) == status
    assert not find_status(begun, *[more] * min(5, num_pieces // 4))


@pytest.mark.parametrize(
    ("target", "host", "found"),
    [
        ("/version", "localhost", ("/version", "localhost")),
        ("/version", "[::1]:8000", ("/version", "[::1]:8000")),
        ("/v?a=//b", "", ("/v?a=//b", "")),
        ("http://localhost/version?a", "evil.test", ("/version?a", "localhost")),
        ("HTTP://localhost", "evil.test", ("/", "localhost")),
        ("http://localhost?a", "evil.test", ("/?a", "localhost")),
    ],
)
def test_a_request_says_once_whom_it_is_for(target: str, host: str, found: tuple[str, str]) -> None:
    (request,) = read(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    seen = (request.head.target.decode(), request.head.headers)
    assert seen == (found[0], [(b"host", found[1].encode())])


@pytest.mark.parametrize(
    ("version", "headers", "keeps_alive", "expects_continue"),
    [
        ("1.1", "", True, False),
        ("1.1", "Expect: 100-Continue\r\n", True, True),
        ("1.1", "Connection: Upgrade, Close\r\n", False, False),
        ("1.1", "connection: closed\r\nexpect: 200-ok\r\n", True, False),
        ("1.0", "connection: keep-alive\r\nexpect: 100-continue\r\n", False, False),
    ],
)
def test_a_head_says_how_the_connection_goes_on(
    version: str, headers: str, keeps_alive: bool, expects_continue: bool
) -> None:
    (request,) = read(f"GET / HTTP/{version}\r\nhost: a\r\n{headers}\r\n".encode())
    assert (request.head.keeps_alive, request.head.expects_continue) == (keeps_alive, expects_continue)


class CountingPattern:
    """A pattern that counts the bytes that it is shown."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self._pattern = pattern
        self.num_bytes = 0

    def match(self, data: bytes) -> re.Match[bytes] | None:
        self.num_bytes += len(data)
        return self._pattern.match(data)


@pytest.mark.parametrize("begun", [b"GET /", b"GET / HTTP/1.1\r\nx: "])
def test_a_head_that_comes_byte_by_byte_is_read_once(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = CountingPattern(request_parser._LINE)
    monkeypatch.setattr(request_parser, "_LINE", pattern)
    assert find_status(begun, *[b"a"] * 1000, b" HTTP/1.1\r\nhost: a\r\n\r\n") == 0
    assert pattern.num_bytes <= 1100


def test_a_line_that_could_be_read_is_told_also_of_a_request_that_is_refused() -> None:
    parser = RequestParser(LIMITS)
    parser.feed(b"GET /live?x HTTP/1.1\r\nx")
    assert parser.take_head() is None
    assert (parser.method, parser.target, parser.num_kept_bytes) == ("GET", b"/live?x", 23)
    parser.feed(b"\0")
    with pytest.raises(ApiError, match=r"^request: expected valid HTTP/1.1 \("):
        parser.take_head()
    assert (parser.method, parser.target) == ("GET", b"/live?x")
    parser.drop()
    assert (parser.method, parser.target, parser.num_kept_bytes) == ("-", b"", 0)
