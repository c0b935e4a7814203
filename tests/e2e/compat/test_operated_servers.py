"""Servers as operators run them: Unix sockets, TLS, root paths, browsers, logs and dashboards.

Two commands serve the shared server's engine, one at a Unix socket with a config file, one over TLS by two
processes; both start at the same time, and no engine does.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import TIMEOUT_S, Served

PEM = str(Path(__file__).parents[2] / "localhost.pem")
SECRET = "words that no log has"
CONFIG = """
root_path: /llm
allowed-origins: ["https://app.example"]
metrics_prefix: "vllm:"
enable-request-id-headers: true
log-format: json
log_level: INFO
disable-access-log-for-endpoints: /metrics
drain_timeout: 20
"""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


class Operated:
    """A `quire serve` over the shared engine. `wait` until it is ready; `stop` tells what it logged."""

    def __init__(self, shared: Served, *arguments: str) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--attach", f"serve-{shared.port}", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        self.box = ""
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += [line.rstrip("\n") for line in self.process.stderr]

    def wait(self) -> None:
        assert self.process.stdout is not None
        while "curl " not in self.box:
            line = self.process.stdout.readline()
            assert line, self.lines
            self.box += line

    def connect(self) -> http.client.HTTPConnection:
        found = re.search(r"socket +(\S+)", self.box)
        assert found
        return UnixConnection(found[1])

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(TIMEOUT_S)
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as path:  # pytest's are too long for a socket
        yield Path(path)


@pytest.fixture(scope="module")
def both(shared_server: Served, folder: Path) -> Iterator[tuple[Operated, Operated]]:
    (folder / "serve.yaml").write_text(CONFIG)
    stale = folder / "q.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(stale))
    servers = (
        Operated(shared_server, "--config", str(folder / "serve.yaml"), "--uds", str(stale)),
        Operated(shared_server, *("--port", "0", "--ssl-certfile", PEM, "--api_server_count=2")),
    )
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        codes = [server.stop() for server in servers]
    assert codes == [0, 0]
    assert not stale.exists()


@pytest.fixture
def at_socket(both: tuple[Operated, Operated]) -> Iterator[http.client.HTTPConnection]:
    connection = both[0].connect()
    yield connection
    connection.close()


def ask(
    connection: http.client.HTTPConnection, path: str, body: Any = None, method: str = "", **headers: str
) -> http.client.HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    own = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None:
        own["content-type"] = "application/json"
    connection.request(method or ("GET" if body is None else "POST"), path, data, own)
    return connection.getresponse()


def test_a_server_is_reached_at_its_unix_socket_with_its_root_path_or_without(
    both: tuple[Operated, Operated], at_socket: http.client.HTTPConnection
) -> None:
    assert re.search(r"curl --unix-socket \S+/q\.sock http://localhost/v1/chat/completions", both[0].box)
    for path in ("/llm/v1/models", "/v1/models"):
        answer = ask(at_socket, path)
        assert (answer.status, json.loads(answer.read())["data"][0]["id"]) == (200, "pocket")
    for path in ("/llm", "/llm/", "/llm/health", "/llm/openapi.json"):
        answer = ask(at_socket, path)
        assert answer.status == 200
        answer.read()
    answer = ask(at_socket, "/llm/v1/completions", {"prompt": "Once", "max_tokens": 2})
    assert len(json.loads(answer.read())["choices"]) == 1


def test_other_origins_pages_and_ids_of_requests(at_socket: http.client.HTTPConnection) -> None:
    wanted = {"origin": "https://app.example", "access_control_request_method": "POST"}
    answer = ask(at_socket, "/v1/completions", method="OPTIONS", **wanted)
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer.read()
    answer = ask(at_socket, "/version", x_request_id="mine", origin="https://evil.example")
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] is None
    answer.read()
    answer = ask(at_socket, "/no/such/path")
    assert (answer.status, len(answer.headers["x-request-id"])) == (404, 32)
    answer.read()


def test_dashboards_made_for_vllm_find_their_series(at_socket: http.client.HTTPConnection) -> None:
    ask(at_socket, "/llm/v1/completions", {"prompt": "Once", "max_tokens": 2, "n": 2}).read()
    text = ask(at_socket, "/metrics").read().decode()
    names = set(re.findall(r"^([a-z0-9_:]+)\{", text, re.M))
    series = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total "
        "prefix_cache_hits_total prompt_tokens_total generation_tokens_total request_success_total "
        "num_preemptions_total cache_config_info"
    )
    histograms = (
        "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds "
        "request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
        "request_inference_time_seconds request_prompt_tokens request_generation_tokens "
        "request_max_num_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total"
    )
    wanted = {f"vllm:{name}" for name in series.split()}
    wanted |= {f"vllm:{name}_{part}" for name in histograms.split() for part in ("bucket", "count", "sum")}
    assert wanted <= names
    assert "quire:" not in text
    assert re.search(r'vllm:cache_config_info\{.*block_size="16".*\} 1\.0', text)
    assert re.search(r'http_requests_total\{handler="/v1/completions",method="POST",status="2xx"\}', text)


def test_tls_is_served_by_each_of_several_processes(both: tuple[Operated, Operated]) -> None:
    found = re.search(r"https://127\.0\.0\.1:(\d+)/v1", both[1].box)
    assert found
    port = int(found[1])
    context = ssl.create_default_context(cafile=PEM)
    connections = [
        http.client.HTTPSConnection("localhost", port, context=context, timeout=TIMEOUT_S) for _ in range(8)
    ]
    for connection in connections:  # at either process
        answer = ask(connection, "/v1/completions", {"prompt": "Once", "max_tokens": 2})
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 2)
    counted = set[str]()
    for connection in connections:
        text = ask(connection, "/metrics").read().decode()
        counted |= set(re.findall(r'http_requests_total\{handler="/v1/completions".*\} (\S+)', text))
        connection.close()
    assert counted == {"8.0"}  # all processes say the same
    with socket.create_connection(("localhost", port), timeout=TIMEOUT_S) as plain:
        plain.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"tls_required" in plain.recv(1000)


def test_the_end_waits_for_what_runs_says_so_and_logs_no_text(
    both: tuple[Operated, Operated], at_socket: http.client.HTTPConnection
) -> None:
    server, _ = both
    body = {"prompt": SECRET, "max_tokens": 200, "ignore_eos": True, "stream": True}
    answer = ask(at_socket, "/llm/v1/completions", body)
    assert answer.readline().startswith(b"data: ")
    refused = server.connect()
    assert ask(refused, "/llm/v1/completions", {"prompt": SECRET, "top_p": 7}).status == 400
    refused.close()
    server.process.send_signal(signal.SIGTERM)
    assert answer.read().rstrip().endswith(b"data: [DONE]")
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines]
    assert {"time", "level", "process", "message"} <= set.intersection(*(set(line) for line in lines))
    told = [line["message"] for line in lines if line["message"].startswith("ending: ")]
    assert re.match(r"ending: 1 requests are under way \(1 sequences of 'pocket'\) and have 20 s", told[0])
    requests = [line for line in lines if line["message"] == "request"]
    assert "/metrics" not in [line["path"] for line in requests]
    (cause,) = [line["cause"] for line in requests if line["status"] == 400]
    assert cause.startswith("top_p: ")
    stream = requests[-1]
    assert (stream["status"], stream["completion_tokens"]) == (200, 200)
    assert SECRET not in "".join(server.lines)
