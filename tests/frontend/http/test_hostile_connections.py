"""Connections that cost without asking for anything: what is stored for them, and who has to go."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.connections.connection import Connection
from quire.frontend.http.server import Server
from server_fakes import Peer, run_with_server

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
KEY = "authorization: Bearer one\r\n"
OTHER_KEY = "authorization: Bearer two\r\n"
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
TOKENIZE = b'{"prompt":"a"}'


def find_connection(server: Server, peer: Peer) -> Connection | None:
    """The server's end of a connection, None once it has ended."""
    address = peer.writer.get_extra_info("sockname")
    connections: Any = server.connections
    return next((one for one in connections if one.client == address), None)


async def flood(peer: Peer, data: bytes, max_bytes: int = 2**26) -> int:
    """Send the same over and over until the server answers or ends the connection; how much it took."""
    sent = 0

    async def write() -> None:
        nonlocal sent
        try:
            while sent < max_bytes:
                await peer.say(data)
                sent += len(data)
        except ConnectionError:
            pass

    writing = asyncio.create_task(write())
    try:
        await asyncio.wait_for(peer.reader._wait_for_data("flood"), 20)  # type: ignore[attr-defined]
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    return sent


@pytest.mark.parametrize(
    ("begun", "more", "status", "code"),
    [
        (CHUNKED + b"0\r\nx: ", b"y" * 2**16, 431, "headers_too_large"),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000, 431, "headers_too_large"),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"x: y\r\n" * 10_000, 431, "headers_too_large"),
        (CHUNKED + b"1;x=", b"y" * 2**16, 413, "body_too_large"),
        (CHUNKED, b"1;x=yyyyyyyyyyyyyyyyyyy\r\na\r\n" * 1000, 413, "body_too_large"),
        (CHUNKED, b"1\r\na\r\n" * 10_000, 413, "body_too_large"),
        (CHUNKED + b"0;x=", b"y" * 2**16, 413, "body_too_large"),
        (b"", b"\r\n" * 2**15, 431, "headers_too_large"),
        (b"GET /live HTTP/1.1\r\nx: ", b"y" * 2**16, 431, "headers_too_large"),
        (b"GET /live HTTP/1.1\r\n", b"x: y\r\n" * 10_000, 431, "too_many_headers"),
    ],
)
def test_every_part_of_a_message_has_an_end(begun: bytes, more: bytes, status: int, code: str) -> None:
    async def scenario(llm: FakeLLM, peer: Peer, _server: Server) -> None:
        await peer.say(begun)
        taken = await flood(peer, more)
        seen, head, body = await peer.read_answer()
        assert (seen, json.loads(body)["error"]["code"]) == (status, code)
        assert "connection: close" in head
        assert taken < 2**23  # what is on its way in the kernel, rather than all of it
        assert not llm.calls

    run_with_server(scenario, max_body_bytes=100_000)


@pytest.mark.parametrize(
    ("key", "request_line", "status"),
    [
        ("", "POST /tokenize", 401),
        ("authorization: Bearer wrong\r\n", "POST /v1/chat/completions", 401),
        ("", "GET /live", 200),
        ("", "POST /ready", 405),
        (KEY, "POST /v1/nothing", 404),
        (KEY, "PUT /tokenize", 405),
        (KEY, "GET /version", 200),
        (KEY + "content-type: text/plain\r\n", "POST /tokenize", 415),
    ],
)
@pytest.mark.parametrize("framing", ["content-length: 8000000\r\n", "transfer-encoding: chunked\r\n"])
def test_what_is_answered_before_its_body_has_come_stores_none_of_it(
    key: str, request_line: str, status: int, framing: str
) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, server: Server) -> None:
        piece = b"10000\r\n" + b"x" * 2**16 + b"\r\n" if "chunked" in framing else b"x" * 2**16
        await peer.say(f"{request_line} HTTP/1.1\r\nhost: localhost\r\n{key}{framing}\r\n".encode() + piece)
        connection = find_connection(server, peer)
        seen, head, _ = await peer.read_answer()
        assert seen == status
        assert "connection: close" in head
        assert connection is not None
        assert connection._admission.bodies.num_bytes == 0
        assert await peer.read_all() == b""

    run_with_server(scenario, api_keys=("one",))


def test_a_trailer_is_no_header() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        body = b"%x\r\n%b\r\n" % (len(TOKENIZE), TOKENIZE)
        await peer.say(CHUNKED + body + b"0\r\n" + KEY.encode() + b"\r\n")
        assert (await peer.read_answer())[0] == 401

    run_with_server(scenario, api_keys=("one",))


def _upgrade(framing: bytes) -> bytes:
    return HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMA\r\n" + framing


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_behind_the_wish_for_another_protocol_is_read_as_a_body(pause: bool, is_chunked: bool) -> None:
    """What `curl --http2 -d` sends; the second one's body is a request for who takes it for one."""

    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        for body, status in ((TOKENIZE, 200), (b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n", 400)):
            if is_chunked:
                head = _upgrade(b"transfer-encoding: chunked\r\n\r\n")
                framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            else:
                head, framed = _upgrade(b"content-length: %d\r\n\r\n" % len(body)), body
            if pause:
                await peer.say(head)
                await peer.say((await (await peer.make_neighbour()).ask_live()) and framed)
            else:
                await peer.say(head + framed)
            assert (await peer.read_answer())[0] == status
        await peer.say(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status, _, answer = await peer.read_answer()
        assert (status, "version" in json.loads(answer)) == (200, True)
        assert await peer.read_all() == b""

    run_with_server(scenario)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (HEAD + b"content-length: 1\r\ncontent-length: 1\r\n\r\na", 400),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\na", 400),
        (HEAD + b"content-length: 1, 1\r\n\r\na", 400),
        (HEAD + b"content-length: -1\r\n\r\na", 400),
        (HEAD + b"content-length: +1\r\n\r\na", 400),
        (HEAD + b"content-length: \r\n\r\na", 400),
        (HEAD + b"content-length: " + b"9" * 19 + b"\r\n\r\na", 413),
        (HEAD + b"content-length: " + b"9" * 10_000 + b"\r\n\r\na", 400),
        (HEAD + b"content-length: " + b"0" * 10_000 + b"99999999\r\n\r\na", 413),
        (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (CHUNKED + b"-1\r\n", 400),
        (CHUNKED + b"f" * 17 + b"\r\n", 400),
        (CHUNKED + b"1\nab", 400),
        (CHUNKED + b"1\r\nab\r\n", 400),
        (HEAD + b"x: a\0b\r\n\r\n", 400),
        (HEAD + b"x\0: a\r\n\r\n", 400),
        (HEAD + b"x : a\r\n\r\n", 400),
        (HEAD + b"x: a\r\n b\r\n\r\n", 400),
        (b"GET /\0 HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"GET http://a HTTP/1.1\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"host: localhost\r\n\r\n", 400),
        (b"GET /live\r\n\r\n", 400),
        (b"GET /live HTTP/0.9\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /live HTTP/2.0\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\nhost: localhost\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nhost: localhost\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nhost: localhost\rx: y\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nhost: localhost\r\n\n", 400),
        (b"POST /tokenize HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: ,chunked\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1 \r\na\r\n0\r\n\r\n", 400),
        (CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1;a\nb\r\na\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\r\na\n0\r\n\r\n", 400),
        (CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
def test_a_request_of_two_meanings_or_none_is_answered_once_and_the_connection_ends(
    request_bytes: bytes, status: int
) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        await peer.say(request_bytes + b"GET /live HTTP/1.1\r\n\r\n")
        seen, head, _ = await peer.read_answer()
        assert seen == status
        assert "connection: close" in head
        assert await peer.read_all() == b""

    run_with_server(scenario)


def test_a_body_behind_the_wish_for_another_protocol_has_its_own_refusal() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        head = _upgrade(b"content-length: %d\r\n\r\n" % len(TOKENIZE))
        await peer.say(head + TOKENIZE + b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await peer.read_answer())[0] == 200
        assert (await peer.read_answer())[0] == 405

    run_with_server(scenario)


def test_what_follows_a_connections_last_request_is_not_answered() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        last = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        await peer.say(last + b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await peer.read_answer())[0] == 200
        assert await peer.read_all() == b""

    run_with_server(scenario)


def test_requests_behind_one_that_is_not_answered_are_bounded() -> None:
    async def scenario(llm: FakeLLM, peer: Peer, _server: Server) -> None:
        llm.gate.clear()
        await peer.post("/v1/chat/completions", CHAT)
        await llm.wait_for_calls(1)
        await peer.say(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10)
        assert await (await peer.make_neighbour()).ask_live()
        llm.gate.set()
        for _ in range(10):
            assert (await peer.read_answer())[0] == 200
        status, _, body = await peer.read_answer()
        assert (status, "max_pipelined" in body) == (429, True)
        assert await peer.read_all() == b""

    run_with_server(scenario, max_pipelined=9)


def test_answers_to_requests_in_a_row_that_nobody_reads_do_not_keep_their_connection() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, server: Server) -> None:
        slow = await peer.make_neighbour(receive_buffer=4096)
        slow.writer.transport.pause_reading()
        for _ in range(20):  # past what the kernel takes for a reader that does not read
            await slow.say(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
        await server.connections.emptied.wait()  # type: ignore[attr-defined]

    run_with_server(scenario, write_timeout_s=0.3, max_keep_alive_s=0.3, max_header_s=60.0)


def test_a_body_that_did_not_come_whole_is_let_go_with_its_connection() -> None:
    """Not when the collector comes by, which it hardly does in a process that has nothing to do."""

    async def scenario(_llm: FakeLLM, peer: Peer, server: Server) -> None:
        gc.disable()
        await peer.say(HEAD + KEY.encode() + b"content-length: 90000\r\n\r\n" + b" " * 80_000)
        connection = find_connection(server, peer)
        assert connection is not None
        while connection._admission.bodies.num_bytes < 80_000:
            await asyncio.sleep(0)
        request = weakref.ref(connection.exchanges[0])
        peer.writer.transport.abort()
        await server.connections.emptied.wait()  # type: ignore[attr-defined]
        assert request() is None

    try:
        run_with_server(scenario, api_keys=("one",))
    finally:
        gc.enable()


def test_bodies_of_one_key_that_fill_the_room_do_not_cost_another_its_request() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, server: Server) -> None:
        greedy = [await peer.make_neighbour() for _ in range(6)]
        for one in greedy:
            await one.say(HEAD + KEY.encode() + b"content-length: 90000\r\n\r\n" + b" " * 80_000)
        small = await peer.make_neighbour()
        await small.say(HEAD + OTHER_KEY.encode() + b"content-length: 60000\r\n\r\n" + b" " * 59_000)
        answers = asyncio.as_completed([one.read_answer() for one in greedy])
        refused = [await next(answers) for _ in range(4)]  # 6 * 80,000 + 59,000 do not fit 200,000
        assert {status for status, _, _ in refused} == {429}
        assert all("max_total_body_bytes" in body and "retry-after: 1" in head for _, head, body in refused)
        await small.say(TOKENIZE.rjust(1000))
        assert (await small.read_answer())[0] == 200
        for one in greedy:  # two are left, and one of them may finish
            one.writer.write(TOKENIZE.rjust(10_000))
        rest = [await answer for answer in answers]
        assert {status for status, _, _ in rest} == {200}
        assert find_any(server)._admission.bodies.num_bytes == 0

    run_with_server(scenario, api_keys=("one", "two"), max_body_bytes=90_000, max_total_body_bytes=230_000)


def test_an_idle_connection_keeps_nothing_of_what_was_answered() -> None:
    async def scenario(llm: FakeLLM, peer: Peer, server: Server) -> None:
        llm.gate.clear()
        await peer.post("/v1/chat/completions", CHAT, KEY + f"x: {'y' * 60_000}\r\n")
        await llm.wait_for_calls(1)
        connection = find_any(server)
        assert connection._admission.headers.num_bytes > 60_000
        llm.gate.set()
        assert (await peer.read_answer())[0] == 200
        assert connection._admission.headers.num_bytes == 0
        assert not connection.exchanges
        assert not connection._headers

    run_with_server(scenario, api_keys=("one",))


def test_a_client_that_leaves_frees_all_requests_in_its_row() -> None:
    async def scenario(llm: FakeLLM, peer: Peer, server: Server) -> None:
        llm.gate.clear()
        row = await peer.make_neighbour()
        await row.post("/v1/chat/completions", CHAT)
        await llm.wait_for_calls(1)
        await row.post("/v1/chat/completions", CHAT)
        connection = find_connection(server, row)
        assert connection is not None
        while len(connection.exchanges) < 2:
            assert await peer.ask_live()
        connection.transport.abort()  # a paused connection learns of its client's end when it writes
        await llm.wait_for_calls(1, num_ended=1)
        assert connection._admission.headers.num_bytes == 0

    run_with_server(scenario)


def find_any(server: Server) -> Connection:
    connections: Any = server.connections
    return next(iter(connections))


def test_heads_without_a_key_are_bounded_together_and_those_with_one_get_through() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, server: Server) -> None:
        slow = [await peer.make_neighbour() for _ in range(40)]
        for one in slow:
            await one.say(b"GET /live HTTP/1.1\r\nx: " + b"y" * 30_000)
        refused = await asyncio.wait_for(slow[-1].read_answer(), 10)
        assert (refused[0], "max_total_header_bytes" in refused[2]) == (429, True)
        assert find_any(server)._admission.headers.num_bytes <= 400_000
        await peer.post("/v1/chat/completions", CHAT, KEY)
        assert (await peer.read_answer())[0] == 200

    run_with_server(scenario, api_keys=("one",), max_total_header_bytes=400_000)


@pytest.mark.parametrize(
    "says", [b"", b"GET /live HTTP/1.1\r\nx: y\r\n", b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n", CHUNKED]
)
def test_connections_without_a_key_leave_room_for_one_that_has_it(says: bytes) -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        await peer.post("/v1/chat/completions", CHAT, KEY)
        assert (await peer.read_answer())[0] == 200
        for _ in range(30):
            (await peer.make_neighbour()).writer.write(says)
        late = await peer.make_neighbour()
        await late.post("/v1/chat/completions", CHAT, KEY)
        assert (await late.read_answer())[0] == 200
        await peer.post("/v1/chat/completions", CHAT, KEY)  # its idle connection was not the one to go
        assert (await peer.read_answer())[0] == 200

    run_with_server(scenario, api_keys=("one",), max_connections=10)


def test_idle_connections_of_one_key_leave_room_for_another_key() -> None:
    async def scenario(_llm: FakeLLM, peer: Peer, _server: Server) -> None:
        await peer.post("/v1/chat/completions", CHAT, OTHER_KEY)
        assert (await peer.read_answer())[0] == 200
        idle = [await peer.make_neighbour() for _ in range(9)]
        for one in idle:
            await one.post("/v1/chat/completions", CHAT, KEY)
            assert (await one.read_answer())[0] == 200
        for longest_idle in idle[:4]:
            late = await peer.make_neighbour()
            assert await longest_idle.read_all() == b""
            await late.post("/v1/chat/completions", CHAT, OTHER_KEY)
            assert (await late.read_answer())[0] == 200
        await peer.post("/v1/chat/completions", CHAT, OTHER_KEY)
        assert (await peer.read_answer())[0] == 200

    run_with_server(scenario, api_keys=("one", "two"), max_connections=10)
