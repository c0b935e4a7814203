"""What clients, probes and proxies send beside plain requests, through a real socket."""

from __future__ import annotations

import json

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.server import Server
from server_fakes import Peer
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
