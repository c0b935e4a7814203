"""What stands around the routes: root paths, allowed hosts, other origins' pages, ids of requests."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.connections.hosts import AllowedHosts
from quire.frontend.http.connections.listen import listen_at_path
from quire.frontend.http.errors import ApiError
from quire.frontend.http.options import CorsOptions
from quire.ipc.errors import ConfigError
from server_fakes import OpenServer, Peer

KEY = "authorization: Bearer one\r\n"


async def ask(peer: Peer, method: str, path: str, headers: str = "") -> tuple[int, dict[str, str], str]:
    host = "" if headers.startswith("host:") else "host: localhost\r\n"
    await peer.say(f"{method} {path} HTTP/1.1\r\n{host}{headers}\r\n".encode())
    status, head, body = await peer.read_answer()
    fields = (line.partition(": ") for line in head.lower().split("\r\n")[1:] if line)
    return status, {name: value for name, _, value in fields}, body


@pytest.mark.server(api_keys=("one",), options={"root_path": "/llm"})
async def test_a_root_path_is_taken_away_where_a_proxy_has_left_it(peer: Peer) -> None:
    for path in ("/llm/v1/models", "/v1/models", "/llm/live?x=1", "/llm?x=1", "/llm/"):
        assert (await ask(peer, "GET", path, KEY))[0] == 200, path
    for path in ("/llmv1/models", "/llm/llm/v1/models", "/other/v1/models"):
        assert (await ask(peer, "GET", path, KEY))[0] == 404, path
    assert (await ask(peer, "GET", "/llm/v1/models"))[0] == 401
    _, _, body = await ask(peer, "GET", "/llm/openapi.json", KEY)
    assert json.loads(body)["servers"] == [{"url": "/llm"}]
    await peer.post("/llm/tokenize", {"prompt": "a"}, KEY)
    assert (await peer.read_answer())[0] == 200


@pytest.mark.server(options={"allowed_hosts": ("models.example",)})
async def test_a_host_that_is_not_allowed_is_refused_before_its_body_is_read(
    llm: FakeLLM, peer: Peer
) -> None:
    assert await peer.ask_live()  # a probe names the address of its pod
    body = "content-length: 1000\r\ncontent-type: application/json\r\n\r\n{"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\n{body}"
    await peer.say(head.encode())
    status, head, text = await peer.read_answer()
    assert (status, json.loads(text)["error"]["code"]) == (403, "host_not_allowed")
    assert "connection: close" in head.lower()
    assert not llm.calls


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        (b"models.example", True),
        (b"Models.Example:8000", True),
        (b"a.inner.example", True),
        (b"a.b.inner.example.", True),
        (b"inner.example", False),
        (b"models.example.evil", False),
        (b"[::1]:80", True),
        (b"127.0.0.1", False),
        (b"", False),
    ],
)
def test_names_are_allowed_with_any_port_and_below_a_star(host: bytes, is_allowed: bool) -> None:
    hosts = AllowedHosts(["models.EXAMPLE", "*.inner.example", "::1"])
    try:
        hosts.check([(b"accept", b"*/*"), (b"host", host)])
    except ApiError:
        assert not is_allowed
    else:
        assert is_allowed
    AllowedHosts(["*"]).check([(b"host", host)])


def preflight(origin: str) -> str:
    asked = {"method": "POST", "headers": "authorization"}
    lines = [f"access-control-request-{name}: {value}\r\n" for name, value in asked.items()]
    return f"origin: {origin}\r\n{''.join(lines)}"


@pytest.mark.server(api_keys=("one",), options={"cors": CorsOptions(origins=("https://app.example",))})
async def test_a_browser_may_ask_before_its_request_without_a_key(peer: Peer) -> None:
    path = "/v1/chat/completions"
    status, headers, _ = await ask(peer, "OPTIONS", path, preflight("https://app.example"))
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "authorization" in headers["access-control-allow-headers"]
    status, headers, _ = await ask(peer, "OPTIONS", path, preflight("https://evil.example"))
    assert status == 400
    assert "access-control-allow-origin" not in headers
    origin = "origin: https://app.example\r\n"
    status, headers, _ = await ask(peer, "GET", "/v1/models", origin)
    assert (status, headers["access-control-allow-origin"]) == (401, "https://app.example")
    status, headers, _ = await ask(peer, "GET", "/v1/models", origin + KEY)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert "x-request-id" in headers["access-control-expose-headers"].lower()


async def test_no_other_origin_may_ask_a_server_without_the_option(peer: Peer) -> None:
    status, headers, _ = await ask(peer, "OPTIONS", "/v1/models", preflight("https://app.example"))
    assert status == 405
    assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.server(api_keys=("one",), options={"enable_request_id_headers": True})
async def test_every_answer_has_the_id_of_its_request_where_the_option_says_so(peer: Peer) -> None:
    async def find_id(path: str, headers: str = "") -> str:
        return (await ask(peer, "GET", path, headers))[1]["x-request-id"]

    for path in ("/v1/models", "/live", "/no/such/path"):
        assert await find_id(path, "X-Request-Id: mine-1\r\n" + KEY) == "mine-1"
        assert len(await find_id(path, KEY)) == 32
    assert len(await find_id("/live", f"x-request-id: {'x' * 1000}\r\n")) == 32
    await peer.post("/v1/completions", {"prompt": "a"}, "x-request-id: mine-2\r\n" + KEY)
    _, head, _ = await peer.read_answer()
    assert head.lower().count("x-request-id: ") == 1
    assert "x-request-id: mine-2\r\n" in head


async def test_a_unix_socket_is_served_and_its_file_goes_with_the_server(
    tmp_path: Path, open_server: OpenServer
) -> None:
    path = str(tmp_path / "server.sock")
    with listen_at_path(path) as listening_socket:
        running = await open_server(listener=listening_socket, options={"uds": path})
        peer = running.peer
        status, _, body = await ask(peer, "GET", "/v1/models", "host: any.name\r\n")
        assert (status, json.loads(body)["data"][0]["id"]) == (200, "fake")
        await peer.post("/v1/completions", {"prompt": "a"})
        assert (await peer.read_answer())[0] == 200
        await running.stop()
        assert Path(path).exists()
    assert not Path(path).exists()


def test_a_stale_unix_socket_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    with listen_at_path(path):
        with pytest.raises(ConfigError, match="no server listens"), listen_at_path(path):
            pass
        assert Path(path).exists()
    Path(path).write_text("a file")
    with pytest.raises(ConfigError, match="where nothing is"), listen_at_path(path):
        pass
    assert Path(path).read_text() == "a file"


@pytest.mark.parametrize("path", ["", "/tmp/" + "x" * 110, "/no/such/folder/s.sock"])
def test_a_path_that_cannot_be_a_socket_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="uds="), listen_at_path(path):
        pass


def test_a_file_that_another_server_has_made_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "server.sock")
    with listen_at_path(path):
        Path(path).unlink()
        with listen_at_path(path) as other:
            assert other.getsockname() == path
        Path(path).touch()
    assert Path(path).exists()
