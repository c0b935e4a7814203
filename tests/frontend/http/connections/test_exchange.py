"""One request's answer as bytes: what is written when, and what an app may not say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from quire.frontend.http.connections.connection import Exchange
from quire.frontend.http.errors import ApiError
from starlette.types import Receive, Scope, Send


class FakeConnection:
    """A connection, and its transport, that notes each write and each call."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def is_closing(self) -> bool:
        return False

    def continue_reading(self) -> None:
        pass

    def note_answered(self) -> None:
        self.calls.append("answered")

    def close_after_answer(self) -> None:
        self.calls.append("close")

    def refuse(self, error: ApiError) -> None:
        self.calls.append(int(error.status))


def answer(
    *messages: dict[str, Any], method: str = "POST", version: str = "1.1", expects_continue: bool = False
) -> list[Any]:
    """What is called when an app receives the request, then sends these."""

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "http.request", "body": b"{}", "more_body": False}
        for message in messages:
            await send(message)

    async def run() -> list[Any]:
        connection = FakeConnection()
        exchange = Exchange(
            connection,
            {"method": method, "http_version": version},
            num_header_bytes=0,
            keeps_alive=True,
            expects_continue=expects_continue,
            stores_body=True,
        )
        exchange.take_body(b"{}", is_whole=True)
        await exchange.run(app)
        return connection.calls

    return asyncio.run(run())


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more_body: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more_body}


@pytest.mark.parametrize("expects_continue", [False, True])
def test_an_answers_head_goes_with_the_first_bytes_of_its_body(expects_continue: bool) -> None:
    calls = answer(
        start((b"content-length", b"3")), body(b"a", True), body(b"bc"), expects_continue=expects_continue
    )
    if expects_continue:
        assert calls.pop(0) == b"HTTP/1.1 100 Continue\r\n\r\n"
    head = calls.pop(0)
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert head.endswith(b"\r\ncontent-length: 3\r\n\r\na")
    assert calls == [b"bc", "answered"]


def test_an_answer_without_a_length_goes_in_chunks_and_without_a_body_in_none() -> None:
    calls = answer(start(), body(b"", True), body(b"abc", True), body(b""))
    assert calls[0].endswith(b"\r\ntransfer-encoding: chunked\r\n\r\n")
    assert calls[1:] == [b"3\r\nabc\r\n", b"0\r\n\r\n", "answered"]
    head, told = answer(start((b"content-length", b"3")), body(b"abc"), method="HEAD")
    assert (head.endswith(b"\r\ncontent-length: 3\r\n\r\n"), told) == (True, "answered")
    assert b"chunked" not in answer(start(status=204), body(b""))[0]


def test_a_client_of_1_0_gets_an_answer_without_a_length_as_it_is() -> None:
    head, *rest = answer(start(), body(b"abc", True), body(b"de"), version="1.0")
    assert b"transfer-encoding" not in head
    assert head.endswith(b"\r\n\r\nabc")
    assert rest == [b"de", "answered"]


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        ([], 500),
        ([start((b"x", b"a\r\ny: b"))], 500),
        ([start((b"content-length", b"3")), body(b"abcd")], 500),
        ([start((b"content-length", b"3")), body(b"ab")], 500),
        ([start((b"content-length", b"3")), body(b"ab", True), body(b"cd")], "close"),
        ([start(), body(b"ab", True)], "close"),
    ],
)
def test_an_answer_that_is_none_ends_the_connection(messages: list[dict[str, Any]], end: Any) -> None:
    calls = answer(*messages)
    assert calls[-1] == end
    assert not any(isinstance(call, bytes) and b"\r\ny: b" in call for call in calls)
