"""Connections that cost without asking for anything: what is stored for them, and who has to go."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.connections.connection import Connection
from quire.frontend.http.server import Server
from server_fakes import Peer

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


@pytest.mark.server(api_keys=("one",))
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
async def test_what_is_answered_before_its_body_has_come_stores_none_of_it(
    peer: Peer, server: Server, key: str, request_line: str, status: int, framing: str
) -> None:
    piece = b"10000\r\n" + b"x" * 2**16 + b"\r\n" if "chunked" in framing else b"x" * 2**16
    await peer.say(f"{request_line} HTTP/1.1\r\nhost: localhost\r\n{key}{framing}\r\n".encode() + piece)
    connection = find_connection(server, peer)
    seen, head, _ = await peer.read_answer()
    assert seen == status
    assert "connection: close" in head
    assert connection is not None
    assert connection._admission.bodies.num_bytes == 0
    assert await peer.read_all() == b""


@pytest.mark.server(api_keys=("one",))
async def test_a_trailer_is_no_header(peer: Peer) -> None:
    body = b"%x\r\n%b\r\n" % (len(TOKENIZE), TOKENIZE)
    await peer.say(CHUNKED + body + b"0\r\n" + KEY.encode() + b"\r\n")
    assert (await peer.read_answer())[0] == 401


@pytest.mark.server(write_timeout_s=0.3, max_keep_alive_s=0.3, max_header_s=60.0)
async def test_answers_to_requests_in_a_row_that_nobody_reads_do_not_keep_their_connection(
    peer: Peer, server: Server
) -> None:
    slow = await peer.make_neighbour(receive_buffer=4096)
    slow.writer.transport.pause_reading()
    for _ in range(20):  # past what the kernel takes for a reader that does not read
        await slow.say(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
    await server.connections.emptied.wait()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.server(api_keys=("one",))
async def test_a_body_that_did_not_come_whole_is_let_go_with_its_connection(
    peer: Peer, server: Server
) -> None:
    await peer.say(HEAD + KEY.encode() + b"content-length: 90000\r\n\r\n" + b" " * 80_000)
    connection = find_connection(server, peer)
    assert connection is not None
    while connection._admission.bodies.num_bytes < 80_000:
        await asyncio.sleep(0)
    assert connection.exchange is not None
    request = weakref.ref(connection.exchange)
    peer.writer.transport.abort()
    await server.connections.emptied.wait()  # type: ignore[attr-defined]
    assert request() is None


@pytest.mark.server(api_keys=("one", "two"), max_body_bytes=90_000, max_total_body_bytes=230_000)
async def test_bodies_of_one_key_that_fill_the_room_do_not_cost_another_its_request(
    peer: Peer, server: Server
) -> None:
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


@pytest.mark.server(api_keys=("one",))
async def test_an_idle_connection_keeps_nothing_of_what_was_answered(
    llm: FakeLLM, peer: Peer, server: Server
) -> None:
    llm.gate.clear()
    await peer.post("/v1/chat/completions", CHAT, KEY + f"x: {'y' * 60_000}\r\n")
    await llm.wait_for_calls(1)
    connection = find_any(server)
    assert connection._admission.headers.num_bytes > 60_000
    llm.gate.set()
    assert (await peer.read_answer())[0] == 200
    assert connection._admission.headers.num_bytes == 0
    assert connection.exchange is None


def find_any(server: Server) -> Connection:
    connections: Any = server.connections
    return next(iter(connections))


@pytest.mark.server(api_keys=("one",), max_total_header_bytes=400_000)
async def test_heads_without_a_key_are_bounded_together_and_those_with_one_get_through(
    peer: Peer, server: Server
) -> None:
    slow = [await peer.make_neighbour() for _ in range(40)]
    for one in slow:
        await one.say(b"GET /live HTTP/1.1\r\nx: " + b"y" * 30_000)
    refused = await asyncio.wait_for(slow[-1].read_answer(), 10)
    assert (refused[0], "max_total_header_bytes" in refused[2]) == (429, True)
    assert find_any(server)._admission.headers.num_bytes <= 400_000
    await peer.post("/v1/chat/completions", CHAT, KEY)
    assert (await peer.read_answer())[0] == 200


@pytest.mark.server(api_keys=("one",), max_connections=10)
@pytest.mark.parametrize(
    "says", [b"", b"GET /live HTTP/1.1\r\nx: y\r\n", b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n", CHUNKED]
)
async def test_connections_without_a_key_leave_room_for_one_that_has_it(peer: Peer, says: bytes) -> None:
    await peer.post("/v1/chat/completions", CHAT, KEY)
    assert (await peer.read_answer())[0] == 200
    for _ in range(30):
        (await peer.make_neighbour()).writer.write(says)
    late = await peer.make_neighbour()
    await late.post("/v1/chat/completions", CHAT, KEY)
    assert (await late.read_answer())[0] == 200
    await peer.post("/v1/chat/completions", CHAT, KEY)  # its idle connection was not the one to go
    assert (await peer.read_answer())[0] == 200


@pytest.mark.server(api_keys=("one", "two"), max_connections=10)
async def test_idle_connections_of_one_key_leave_room_for_another_key(peer: Peer) -> None:
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
