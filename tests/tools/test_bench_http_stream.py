"""The load client: an answer reads the same however it is split, and a bad one is told."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mock_openai import Behaviour, MockOpenAI
from quire.ipc.errors import InputError
from quire.tools.bench.http_stream import AnswerError, AnswerParser, Endpoint, EventParser, HttpClient
from quire.tools.bench.load import LoadOptions, RequestRecord, VectorReader, run_load, send_request
from quire.tools.bench.prompts import Ask

pytestmark = pytest.mark.slow

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\ndata: \r\nA;name=value\r\na\n\n:ping\r\n\r\n"
    b"16\r\n\r\ndata: b\ndata:c\n\nid:1\r\n0\r\nTrailer: x\r\n\r\n"
)
EVENTS = [b"a", b"b\nc"]


def split_at(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


@given(st.lists(st.integers(0, 1000), max_size=8))
def test_an_answer_reads_the_same_however_it_is_split(places: list[int]) -> None:
    answer, events = AnswerParser(), EventParser()
    found = [event for piece in split_at(CHUNKED, places) for event in events.feed(answer.feed(piece))]
    assert found == EVENTS
    assert (answer.status, answer.is_complete, answer.can_be_reused) == (200, True, True)


@pytest.mark.parametrize(
    ("answer", "body", "is_complete", "can_be_reused"),
    [
        (b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nab", b"ab", True, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", b"", True, False),
        (b"HTTP/1.0 200 OK\r\n\r\nab", b"ab", False, False),  # until the connection ends
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", b"ab", False, True),
    ],
)
def test_a_body_has_the_length_that_its_head_says(
    answer: bytes, body: bytes, is_complete: bool, can_be_reused: bool
) -> None:
    parser = AnswerParser()
    assert parser.feed(answer) == body
    assert (parser.is_complete, parser.can_be_reused) == (is_complete, can_be_reused)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
    ],
)
def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    with pytest.raises(AnswerError):
        AnswerParser().feed(answer)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", CHUNKED[:-20]])
def test_an_answer_that_is_cut_off_is_an_error(answer: bytes) -> None:
    parser = AnswerParser()
    parser.feed(answer)
    with pytest.raises(AnswerError, match="the connection ended"):
        parser.end()


@pytest.mark.parametrize(
    ("url", "host", "port", "target"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, "/v1/x"),
        ("http://localhost:8000/v1/", "localhost", 8000, "/v1/x"),
        ("https://example.org/api/v1", "example.org", 443, "/api/v1/x"),
        ("http://[::1]:9", "::1", 9, "/v1/x"),
    ],
)
def test_a_base_url_may_end_in_v1(url: str, host: str, port: int, target: str) -> None:
    endpoint = Endpoint.parse(url, "secret")
    assert (endpoint.host, endpoint.port) == (host, port)
    head = endpoint.encode_request("POST", "/v1/x", b"{}").decode()
    assert head.startswith(f"POST {target} HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer secret\r\n" in head
    assert head.endswith("\r\nContent-Length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", "http://u:p@x"]
)
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="base_url="):
        Endpoint.parse(url, None)


def test_a_key_that_would_break_the_head_is_refused_and_not_shown() -> None:
    with pytest.raises(InputError) as caught:
        Endpoint.parse("http://x", "secret\r\nX: y")
    assert "secret" not in str(caught.value)


def at_once(timeout_s: float) -> LoadOptions:
    return LoadOptions(float("inf"), max_concurrency=1, timeout_s=timeout_s, seed=0)


def ask_for(mock: MockOpenAI, prompt: str) -> bytes:
    body = Ask(prompt, 3).encode("mock", "chat", temperature=0.0, ignore_eos=False)
    return Endpoint.parse(mock.base_url, None).encode_request("POST", "/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("refuse", "HTTP 429: too many requests"),
        ("cut", "the connection ended within the answer"),
        ("undone", "the stream ended without [DONE]"),
        ("error", "error in the stream: the engine failed"),
        ("silent", "no complete answer within 0.2 s"),
    ],
)
def test_a_failed_request_has_its_reason_and_the_client_goes_on(how: str, reason: str) -> None:
    async def ask(mock: MockOpenAI) -> tuple[str | None, str | None]:
        client = HttpClient(Endpoint.parse(mock.base_url, None))
        first = await send_request(client, ask_for(mock, "bad one"), RequestRecord(0.0), at_once(0.2))
        second = await send_request(client, ask_for(mock, "good one"), RequestRecord(0.0), at_once(5.0))
        await client.close()
        return first, second

    with MockOpenAI(Behaviour(failures={"bad": how})) as mock:
        assert asyncio.run(ask(mock)) == (reason, None)


def test_a_server_that_is_not_there_is_the_reason() -> None:
    async def ask(base_url: str, request: bytes) -> str | None:
        client = HttpClient(Endpoint.parse(base_url, None))
        return await send_request(client, request, RequestRecord(0.0), at_once(5.0))

    with MockOpenAI() as mock:
        request, base_url = ask_for(mock, "x"), mock.base_url
    assert "ConnectionRefusedError" in (asyncio.run(ask(base_url, request)) or "")


@pytest.mark.parametrize(("closes", "num_connections"), [(False, 1), (True, 5)])
def test_connections_are_kept_and_a_closed_one_is_replaced(closes: bool, num_connections: int) -> None:
    async def load(mock: MockOpenAI) -> list[str | None]:
        client = HttpClient(Endpoint.parse(mock.base_url, None))
        result = await run_load(client, [ask_for(mock, "x")] * 5, at_once(5.0))
        await client.close()
        return [record.error for record in result.records]

    with MockOpenAI(Behaviour(closes_after_answer=closes)) as mock:
        assert asyncio.run(load(mock)) == [None] * 5
        assert mock.num_connections == num_connections
        assert len(mock.asked) == 5


def test_an_answer_counts_when_it_has_a_vector() -> None:
    record = RequestRecord(0.0)
    reader = VectorReader(record)
    reader.take_body(200, b'{"data": [{"embedding": "AAAA"}], "usage"', 0.0)
    reader.take_body(200, b': {"prompt_tokens": 7}}', 0.0)
    reader.finish(200)
    assert (record.num_prompt_tokens, record.has_usage) == (7, True)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, b'{"error": {"message": "input: empty"}}', "HTTP 400: input: empty"),
        (200, b'{"data": [], "usage": {}}', "without vectors"),
        (200, b"<html>", "without vectors"),
    ],
)
def test_an_answer_without_a_vector_is_a_failure(status: int, body: bytes, error: str) -> None:
    reader = VectorReader(RequestRecord(0.0))
    reader.take_body(status, body, 0.0)
    with pytest.raises(AnswerError, match=error):
        reader.finish(status)
