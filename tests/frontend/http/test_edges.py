"""What clients, probes and proxies send beside plain requests, through a real socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.server import Server
from server_fakes import OpenServer, Peer
from top_fakes import make_snapshot

JSON = "content-type: application/json\r\n"


async def ask(peer: Peer, line: str, headers: str = "") -> tuple[int, dict[str, str]]:
    """Status and headers of an answer without a body."""
    await peer.say(f"{line} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode())
    head = (await peer.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    return int(head[0].split()[1]), dict(field.lower().split(": ", 1) for field in head[1:-2])


async def get(peer: Peer, target: str, method: str = "GET") -> tuple[int, str]:
    await peer.say(f"{method} {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    status, _, body = await peer.read_answer()
    return status, body


VARIES = ("date", "content-length")  # of what tells the time, or a number of requests
GETS = ("/live", "/ready", "/health", "/ping", "/", "/v1/models", "/v1/models/tiny", "/version", "/metrics")


@pytest.mark.parametrize("path", [*GETS, "/stats", "/openapi.json", "/v1/models/other", "/nothing", "/load"])
async def test_head_is_answered_as_get_without_a_body(peer: Peer, path: str) -> None:
    await peer.say(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    status, head, body = await peer.read_answer()
    fields = dict(field.lower().split(": ", 1) for field in head.split("\r\n")[1:-2])
    answer, headers = await ask(peer, f"HEAD {path}")
    assert answer == status
    assert headers.keys() == fields.keys()
    changes = {*VARIES, "content-length"} if path in ("/metrics", "/stats") else {"date"}
    assert {name: headers[name] for name in headers.keys() - changes} == {
        name: fields[name] for name in fields.keys() - changes
    }
    assert int(headers["content-length"]) > 0 < len(body)
    assert await peer.ask_live()  # nothing of a body stands before the next answer


async def test_head_says_that_a_server_is_not_well(peer: Peer, server: Server) -> None:
    server._models.parts.drain()
    for path in ("/ready", "/health", "/ping"):
        status, headers = await ask(peer, f"HEAD {path}")
        assert (status, len((await get(peer, path))[1])) == (503, int(headers["content-length"]))


async def test_head_of_a_stream_ends_at_once(peer: Peer, llm: FakeLLM) -> None:
    llm.answered_snapshot = make_snapshot()
    status, headers = await ask(peer, "HEAD /stats/stream")
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert await peer.ask_live()


@pytest.mark.server(api_keys=("one",), max_header_bytes=4096)
@pytest.mark.parametrize("line", ["HEAD /v1/models", "HEAD /live", "HEAD /nothing"])
async def test_what_refuses_head_has_no_body_either(peer: Peer, line: str) -> None:
    status, headers = await ask(peer, line)
    assert status == (200 if "live" in line else 401)
    status, headers = await ask(peer, "HEAD /live", f"x: {'y' * 5000}\r\n")
    assert (status, headers["connection"]) == (431, "close")
    assert await peer.read_all() == b""


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        ("POST /live", "get, head"),
        ("OPTIONS /v1/chat/completions", "post"),
        ("OPTIONS /", "get, head"),
        ("PUT /v1/responses/x", "delete, get, head"),
        ("HEAD /v1/chat/completions", "post"),
    ],
)
async def test_another_method_is_told_which_there_are(peer: Peer, line: str, allowed: str) -> None:
    status, headers = await ask(peer, line)
    assert (status, headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions/",
        "//v1/completions",
        "/v1//completions",
        "/v1/%63ompletions",
        "http://localhost//v1/completions/",
    ],
)
async def test_slashes_too_many_and_encoded_letters_lead_to_the_same_route(peer: Peer, path: str) -> None:
    await peer.post(path, {"prompt": "a"}, "connection: close\r\n")
    status, _, body = await peer.read_answer()
    assert (status, json.loads(body)["object"]) == (200, "text_completion")


PATHS = {
    "/v1/models/": 200,
    "//v1/models?x=//": 200,
    "/v1/models/org/tiny": 200,
    "/v1/models/org%2Ftiny": 200,
    "/v1/models//data/tiny": 200,
    "/v1/models/%2Fdata%2Ftiny": 200,
    "/v1/models/data/other": 404,
    "/live/": 200,
    "//": 200,
    "/v1/models/%ff%00": 404,
}


@pytest.mark.server(llm=FakeLLM(served_model_name="org/tiny", served_model_aliases=("/data/tiny",)))
async def test_paths_of_models_may_have_slashes_of_their_own(peer: Peer) -> None:
    assert {path: (await get(peer, path))[0] for path in PATHS} == PATHS


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "'/v1/chat/completions'"),
        ("/v1/v1/models", "'/v1/models'"),
        ("/v1/health", "'/health'"),
        ("/nothing", "/openapi.json"),
    ],
)
async def test_a_path_that_is_not_there_is_told_one_that_is(peer: Peer, path: str, hint: str) -> None:
    status, body = await get(peer, path)
    assert status == 404
    assert hint in body


@pytest.mark.server(max_header_bytes=4096)
async def test_a_target_that_is_too_long_is_refused_as_one(peer: Peer) -> None:
    await peer.say(b"GET /" + b"a" * 5000)
    status, head, body = await peer.read_answer()
    assert (status, json.loads(body)["error"]["code"]) == (414, "uri_too_long")
    assert "connection: close" in head


@pytest.mark.parametrize(
    "headers",
    ['if-none-match: "x", *\r\n', "range: bytes=0-3\r\n", "expect: 100-continue\r\n", "te: trailers\r\n"],
)
async def test_what_asks_for_less_than_the_answer_gets_it_whole(peer: Peer, headers: str) -> None:
    status, fields = await ask(peer, "GET /live", headers)
    body = await peer.reader.readexactly(int(fields["content-length"]))
    assert (status, json.loads(body)["status"]) == (200, "live")


BODY = json.dumps({"prompt": "a" * 40}).encode()
RAW_DEFLATE = zlib.compress(BODY)[2:-4]
PACKED = [
    ("gzip", gzip.compress(BODY)),
    ("X-GZIP", gzip.compress(BODY)),
    ("gzip, identity", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:])),
    ("deflate", zlib.compress(BODY)),
    ("deflate", RAW_DEFLATE),
    ("identity", BODY),
    ("", BODY),
]


async def post_packed(peer: Peer, coding: str, body: bytes, chunk_bytes: int = 0, more: str = "") -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{JSON}content-encoding: {coding}\r\n{more}"
    if chunk_bytes:
        pieces = [body[place : place + chunk_bytes] for place in range(0, len(body), chunk_bytes)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        head += "transfer-encoding: chunked\r\n\r\n"
    else:
        head += f"content-length: {len(body)}\r\n\r\n"
    await peer.say(head.encode() + body)


@pytest.mark.parametrize(("coding", "body"), PACKED, ids=range(len(PACKED)))
@pytest.mark.parametrize("chunk_bytes", [0, 3])
async def test_a_packed_body_is_as_the_plain_one(
    peer: Peer, llm: FakeLLM, coding: str, body: bytes, chunk_bytes: int
) -> None:
    await peer.post("/v1/completions", json.loads(BODY))
    plain = await peer.read_answer()
    await post_packed(peer, coding, body, chunk_bytes)
    status, _, answer = await peer.read_answer()
    assert (status, json.loads(answer)["choices"]) == (200, json.loads(plain[2])["choices"])
    assert llm.calls[0].prompt == llm.calls[1].prompt
    assert await peer.ask_live()


@pytest.mark.parametrize(
    "coding", ["br", "zstd", "gzip, gzip", "gzip\r\ncontent-encoding: deflate", "gz\xff"]
)
async def test_a_coding_that_is_not_known_is_refused_by_name_with_those_that_are(
    peer: Peer, coding: str
) -> None:
    await post_packed(peer, coding, gzip.compress(gzip.compress(BODY)))
    status, head, body = await peer.read_answer()
    assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_content_encoding")
    assert f"content-encoding='{coding[:2]}" in body
    assert "accept-encoding: gzip, deflate, identity\r\n" in head


@pytest.mark.server(api_keys=("one",))
async def test_a_coding_tells_a_stranger_no_more_than_another_header(peer: Peer) -> None:
    await post_packed(peer, "br", BODY)
    assert (await peer.read_answer())[0] == 401


@pytest.mark.parametrize(
    ("coding", "body", "text"),
    [
        ("gzip", gzip.compress(BODY)[:-9], "this ends too early"),
        ("gzip", gzip.compress(BODY)[:-1], "this ends too early"),
        ("gzip", gzip.compress(BODY) + b"junk", "gzip behind its first 1 (incorrect header check)"),
        ("gzip", gzip.compress(BODY)[:-8] + bytes(8), "incorrect data check"),
        ("gzip", BODY, "incorrect header check"),
        ("gzip", gzip.compress(b"") * 300, "at most 256 members"),
        ("deflate", zlib.compress(BODY) + b"x", "1 more bytes"),
        ("deflate", RAW_DEFLATE[:-4], "this ends too early"),
        ("deflate", BODY, "deflate"),
        ("identity", gzip.compress(BODY), "this is gzip"),
        ("gzip", gzip.compress(b"no JSON"), "JSON"),
        ("gzip", gzip.compress(gzip.compress(BODY)), "this is gzip"),
    ],
    ids=range(12),
)
async def test_a_packed_body_that_is_not_right_is_told_what_is_wrong(
    peer: Peer, coding: str, body: bytes, text: str
) -> None:
    await post_packed(peer, coding, body)
    status, _, answer = await peer.read_answer()
    assert status == 400
    assert text in json.loads(answer)["error"]["message"]
    assert await peer.ask_live()


@pytest.mark.server(max_body_bytes=2**21, max_total_body_bytes=3 * 2**20)
async def test_what_a_packed_body_unpacks_to_counts_as_a_body(peer: Peer, server: Server) -> None:
    bombs = [await peer.make_neighbour() for _ in range(3)]
    (bodies,) = {id(one._admission.bodies): one._admission.bodies for one in server.connections}.values()
    most = bodies.num_bytes
    hold = bodies.hold

    def watch(member: Any, num_bytes: int) -> None:
        nonlocal most
        hold(member, num_bytes)
        most = max(most, bodies.num_bytes)

    bodies.hold = watch  # type: ignore[method-assign]
    for bomb in bombs:
        await post_packed(bomb, "gzip", gzip.compress(bytes(2**24)))
    answers = [await bomb.read_answer() for bomb in bombs]
    assert {status for status, _, _ in answers} == {413, 429}
    assert 2**21 < most < 3 * 2**20 + 2**18
    assert bodies.num_bytes == 0
    assert await peer.ask_live()


async def test_another_is_answered_while_a_large_body_is_unpacked(peer: Peer, server: Server) -> None:
    await peer.ask_live()
    other = await peer.make_neighbour()
    await other.ask_live()
    await post_packed(peer, "gzip", gzip.compress(b'{"prompt":"%b"}' % bytes(2**22)))
    while not any(one.exchange and len(one.exchange.body) > 2**19 for one in server.connections):
        await asyncio.sleep(0)
    assert await other.ask_live()
    (busy,) = (one for one in server.connections if one.exchange)
    assert busy.exchange.is_answered is False
    peer.leave()
    assert await (await other.make_neighbour()).ask_live()
    bodies = busy._admission.bodies
    while bodies.num_bytes:
        await asyncio.sleep(0)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("charset", ["", "; charset=utf-8", '; charset="UTF-16"'])
async def test_json_is_read_in_each_of_its_encodings(
    peer: Peer, llm: FakeLLM, encoding: str, charset: str
) -> None:
    blanks = " " * 70_000 * (charset == "")  # a body that is read in a thread
    body = ("{" + blanks + '"prompt": "ä€😀"}').encode(encoding)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json{charset}\r\n"
    await peer.say(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    assert (await peer.read_answer())[0] == 200
    assert llm.calls[0].prompt == "ä€😀"


@pytest.mark.parametrize("body", [b"\xff\xfe{\0\0\xd8", b"\xef\xbb\xbf{\xff}", b"{\0", b"\0\0\0\0", b"\xff"])
async def test_what_is_no_encoding_is_no_json(peer: Peer, body: bytes) -> None:
    await post_packed(peer, "", body)
    status, _, answer = await peer.read_answer()
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "kind", ["", "content-type: application/x-www-form-urlencoded\r\n", "content-type:\r\n"]
)
async def test_a_body_has_to_say_that_it_is_json(peer: Peer, kind: str) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: 2\r\n\r\n{{}}"
    await peer.say(head.encode())
    status, _, body = await peer.read_answer()
    assert status == 415
    assert "application/json" in body


@pytest.mark.parametrize(
    ("body", "more"),
    [({"stream": True}, ""), ({}, "connection: keep-alive\r\n"), ({}, "expect: 100-continue\r\n")],
)
async def test_a_client_of_1_0_gets_what_it_knows(peer: Peer, body: dict[str, Any], more: str) -> None:
    data = json.dumps({"prompt": "a"} | body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\n{JSON}{more}content-length: {len(data)}\r\n\r\n"
    await peer.say(head.encode() + data)
    answer, _, rest = (await peer.read_all()).partition(b"\r\n\r\n")  # until the connection ends
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer
    assert b"chunked" not in answer
    assert rest.startswith(b"data: {" if body else b'{"id"')
    assert rest.endswith(b"data: [DONE]\n\n" if body else b"}")


async def test_a_page_of_another_origin_is_told_which_option_lets_it_in(peer: Peer) -> None:
    head = "OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: http://a\r\n"
    await peer.say(f"{head}access-control-request-method: GET\r\n\r\n".encode())
    status, _, body = await peer.read_answer()
    assert status == 405
    assert "--allowed-origins" in body


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_socket_for_both_families_calls_an_address_by_its_own_name(
    open_server: OpenServer, host: str
) -> None:
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    running = await open_server(listener=listener)
    reader, writer = await asyncio.open_connection(host, listener.getsockname()[1])
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    assert host in {one.client[0] for one in running.server.connections}
    names = {one.client_name for one in running.server.connections}
    assert names == ({"127.0.0.1"} if host == "127.0.0.1" else {"127.0.0.1", "0000:0000:0000:0000"})
    writer.close()
