"""`quire bench embed --http`: a text a request at 64 connections, by Quire's server and its peers' in turn.

Every server is a process of its own, asked in turn; the client is the bench's and runs on the same cores.
The floor is the arithmetic's: the ratio that is possible at all is its texts/s over a peer's requests/s.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import uvloop

from .contest import (
    CLOSE_TIMEOUT_S,
    START_TIMEOUT_S,
    ContestError,
    describe_end,
    measure_cpu_s,
    wait_until_idle,
)
from .embed import LONGEST, SHORTEST, EmbedOptions, compute_floor_s, ensure_folder, format_ratio
from .encoder_models import make_texts
from .http_stream import Endpoint, HttpClient
from .load import LoadOptions, LoadResult, LoadRun
from .machine import describe_machine, format_machine
from .measurement import QUIRE
from .peers import Launch, check_embed_peers, make_embed_server_launch
from .prompts import PATHS
from .table import format_megabytes, format_rate, format_table

_NUM_CONNECTIONS = 64
_NUM_REQUESTS = {"tiny-encoder": 4096}  # of a round; a larger model's take longer
_NUM_REQUESTS_OTHERWISE = 512
_TIMEOUT_S = 600.0  # of a request
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class _Round:
    """What a server took for a round's requests. http_cpu_s: of the process that answers HTTP.

    client_cpu_s: of the one that asks, which is no part of cpu_s.
    """

    seconds: float
    cpu_s: float
    http_cpu_s: float
    client_cpu_s: float


class EmbedServer:
    """A contestant that answers /v1/embeddings on a port of this machine."""

    def __init__(self, name: str, launch: Launch, port: int, log_path: str) -> None:
        self.name = name
        self.ready_s = 0.0
        self._port = port
        self._log_path = log_path
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                launch.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **launch.environment},
                start_new_session=True,  # so that all of a peer's processes can be ended together
            )

    def wait_until_ready(self) -> None:
        """Block until it lists its model. Raises ContestError."""
        start = time.monotonic()
        while not self._lists_models():
            if self._process.poll() is not None:
                raise ContestError(describe_end(self.name, self._process.returncode, self._log_path))
            if time.monotonic() - start > START_TIMEOUT_S:
                raise ContestError(f"{self.name}: not ready within {START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        self.ready_s = time.monotonic() - start

    def run(self, model: str, texts: Sequence[str]) -> _Round:
        """Ask for a vector of each text and wait until the server is idle. Raises ContestError."""
        before = measure_cpu_s(self._process.pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            asked = runner.run(self._ask(model, texts))
        wait_until_idle(self._process.pid)
        after = measure_cpu_s(self._process.pid)
        spent = {pid: now - before.get(pid, 0.0) for pid, now in after.items()}
        return _Round(asked.duration_s, sum(spent.values()), spent[self._process.pid], asked.cpu_s)

    def measure_rss(self) -> int:
        """Resident bytes of all its processes."""
        root = psutil.Process(self._process.pid)
        return sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))

    def close(self) -> None:
        """End it: politely, then with what it left behind."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(CLOSE_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lists_models(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    async def _ask(self, model: str, texts: Sequence[str]) -> LoadResult:
        endpoint = Endpoint.parse(f"http://127.0.0.1:{self._port}", None)
        bodies = (
            msgspec.json.encode({"model": model, "input": text, "encoding_format": "base64"})
            for text in texts
        )
        requests = [endpoint.encode_request("POST", PATHS["embeddings"], body) for body in bodies]
        load = LoadOptions(math.inf, _NUM_CONNECTIONS, _TIMEOUT_S, 0, wants_vectors=True)
        client = HttpClient(endpoint)
        try:
            result = await LoadRun(client, requests, load).run()
        finally:
            await client.close()
        failed = [record.error for record in result.records if record.error is not None]
        if failed:
            raise ContestError(f"{self.name}: {len(failed)} requests failed: {failed[0]}")
        return result


def run_embed_http(options: EmbedOptions) -> int:
    """Measure and print; returns 0. Raises ContestError, and InputError for an unusable peer."""
    versions = check_embed_peers(options.peers, options.pythons)
    machine = describe_machine()
    if versions:
        machine["peers"] = ", ".join(f"{name} {one}" for name, one in versions.items())
    print(format_machine(machine) + "\n")
    header = ["", *(f"{name}, requests/s" for name in (QUIRE, *options.peers))]
    header += [*(f"quire/{peer}" for peer in options.peers), "the floor, texts/s", "of the floor"]
    header += ["CPU us/request", "of it HTTP's", "and the client's", "ready, s", "RSS MB"]
    rows = [_measure(model, dtype, options) for model in options.models for dtype in options.dtypes]
    print(format_table(header, rows))
    print(f"a text of {SHORTEST} to {LONGEST} tokens a request, {_NUM_CONNECTIONS} connections, base64")
    return 0


def _measure(model: str, dtype: str, options: EmbedOptions) -> list[str]:
    """The row of a model in a number format."""
    folder = ensure_folder(model)
    num_requests = _NUM_REQUESTS.get(model, _NUM_REQUESTS_OTHERWISE)
    servers: list[EmbedServer] = []
    rounds: dict[str, list[_Round]] = {name: [] for name in (QUIRE, *options.peers)}
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as logs:
        try:
            for name in rounds:
                print(f"{model} {dtype}: starting {name}", file=sys.stderr)
                port = _find_port()
                launch = _make_launch(name, folder, dtype, port, options)
                servers.append(EmbedServer(name, launch, port, f"{logs}/{name}.log"))
                servers[-1].wait_until_ready()
            for number in range(1 + options.rounds):
                texts = make_texts(model, num_requests, SHORTEST, LONGEST, f"round {number}")
                for server in servers if number % 2 else servers[::-1]:
                    found = server.run(str(folder), texts)
                    if number:  # the first one warms up
                        rounds[server.name].append(found)
            size_bytes = servers[0].measure_rss()
        finally:
            for server in servers:
                server.close()
    seconds = {name: [one.seconds for one in found] for name, found in rounds.items()}
    ours_s = statistics.median(seconds[QUIRE])
    floor_s = compute_floor_s(model, dtype, num_requests)
    return [
        f"{model}, {dtype}",
        *(format_rate(num_requests / statistics.median(found)) for found in seconds.values()),
        *(format_ratio(seconds[QUIRE], seconds[peer]) for peer in options.peers),
        format_rate(num_requests / floor_s),
        f"{floor_s / ours_s:.0%}",
        *(f"{cpu_s / num_requests * 1e6:,.0f}" for cpu_s in _find_medians(rounds[QUIRE])),
        f"{servers[0].ready_s:.2f}",
        format_megabytes(size_bytes),
    ]


def _find_medians(rounds: Sequence[_Round]) -> tuple[float, ...]:
    """Seconds of processor time: the server's, its HTTP process's, the client's."""
    each = ([one.cpu_s, one.http_cpu_s, one.client_cpu_s] for one in rounds)
    return tuple(map(statistics.median, zip(*each, strict=True)))


def _make_launch(name: str, folder: Path, dtype: str, port: int, options: EmbedOptions) -> Launch:
    if name != QUIRE:
        return make_embed_server_launch(name, folder, dtype, port, options.pythons[name])
    command = [sys.executable, "-P", "-m", "quire", "serve", str(folder), "--dtype", dtype]
    return Launch([*command, "--port", str(port)])


def _find_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
