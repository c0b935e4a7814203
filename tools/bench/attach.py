"""`quire bench attach`: what a frontend costs that comes to a running daemon, and what HTTP adds to it.

One request at a time, alternating between an AsyncLLM in this process and a server over the same engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import psutil

from ...frontend.async_llm import AsyncLLM
from ...ipc.errors import QuireError
from ...ipc.params.sampling_params import RequestOutputKind, SamplingParams
from .machine import describe_machine, format_machine
from .private_daemon import run_private_daemon
from .table import format_table

_NAME = "bench-attach"
_PROMPT = "Once upon a time"
_NUM_TOKENS = 64
_TIMEOUT_S = 60.0
_SCRIPT = f"""
import sys, time
began = time.monotonic()
from quire import LLM
imported = time.monotonic()
llm = LLM(attach={_NAME!r})
attached = time.monotonic()
import os
rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
print(imported - began, attached - imported, rss, *heavy)
"""


@dataclass(slots=True)
class Latency:
    """Seconds to the first token, and between tokens, of each request."""

    first_s: list[float] = field(default_factory=list[float])
    between_s: list[float] = field(default_factory=list[float])

    def note(self, began: float, arrivals: list[float]) -> None:
        """Enter one request: when it was sent, and when its parts came."""
        self.first_s.append(arrivals[0] - began)
        self.between_s.append((arrivals[-1] - arrivals[0]) / max(1, _NUM_TOKENS - 1))


def run_attach(num_rounds: int, model: str) -> int:
    """Measure and print; returns 0."""
    print(format_machine(describe_machine()) + "\n")
    with run_private_daemon(_NAME, model):
        wall_s, import_s, attach_s, rss_bytes = _measure_scripts(num_rounds)
        with _run_server() as (port, server):
            direct, over_http = asyncio.run(_measure_requests(num_rounds, port))
            server_rss = psutil.Process(server.pid).memory_info().rss
    rows = [
        ["interpreter, import, attach, exit", f"{wall_s * 1e3:.0f} ms"],
        ["import of quire.LLM", f"{import_s * 1e3:.0f} ms"],
        ["LLM(attach=...)", f"{attach_s * 1e3:.1f} ms"],
        ["RSS of that frontend", f"{rss_bytes / 1e6:.0f} MB"],
        ["RSS of an HTTP process", f"{server_rss / 1e6:.0f} MB"],
    ]
    print(format_table(["a frontend of a running daemon", "median"], rows) + "\n")
    print(_format_latencies(direct, over_http))
    print(f"medians of {num_rounds} rounds; {_NUM_TOKENS} tokens a request, one request at a time")
    return 0


def _measure_scripts(num_rounds: int) -> tuple[float, float, float, float]:
    """Medians over fresh processes: wall time, import, attach, RSS."""
    rows: list[tuple[float, float, float, float]] = []
    for _ in range(num_rounds):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-P", "-c", _SCRIPT],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        import_s, attach_s, rss, *heavy = done.stdout.split()
        if heavy:
            raise QuireError(f"an attached frontend has loaded {', '.join(heavy)}")
        rows.append((time.monotonic() - began, float(import_s), float(attach_s), float(rss)))
    wall, imports, attaches, sizes = (statistics.median(column) for column in zip(*rows, strict=True))
    return wall, imports, attaches, sizes


@contextlib.contextmanager
def _run_server() -> Generator[tuple[int, subprocess.Popen[str]]]:
    command = [sys.executable, "-P", "-m", "quire", "serve", "--attach", _NAME, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            found = next(
                filter(None, (re.search(r"http://127.0.0.1:(\d+)/v1", line) for line in server.stdout))
            )
            yield int(found[1]), server
        finally:
            server.terminate()


async def _measure_requests(num_rounds: int, port: int) -> tuple[Latency, Latency]:
    direct, over_http = Latency(), Latency()
    async with AsyncLLM(attach=_NAME) as llm:
        for number in range(num_rounds + 1):
            answers = [
                (direct, await _ask_engine(llm)),
                (over_http, await asyncio.to_thread(_ask_server, port)),
            ]
            if number:  # the first round warms up
                for latency, (began, arrivals) in answers:
                    latency.note(began, arrivals)
    return direct, over_http


async def _ask_engine(llm: AsyncLLM) -> tuple[float, list[float]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    began = time.monotonic()
    arrivals = [time.monotonic() async for _ in llm.generate(_PROMPT, params)]
    return began, arrivals


def _ask_server(port: int) -> tuple[float, list[float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    body = {
        "prompt": _PROMPT,
        "temperature": 0,
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        connection.connect()
        began = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return began, [time.monotonic() for line in response if line.startswith(b"data: {")]
    finally:
        connection.close()


def _format_latencies(direct: Latency, over_http: Latency) -> str:
    rows: list[list[str]] = []
    for name, one, other in (
        ("time to first token, ms", direct.first_s, over_http.first_s),
        ("between tokens, ms", direct.between_s, over_http.between_s),
    ):
        inside, outside = statistics.median(one) * 1e3, statistics.median(other) * 1e3
        rows.append([name, f"{inside:.2f}", f"{outside:.2f}", f"{outside - inside:+.2f}"])
    return format_table(["one request", "AsyncLLM(attach=)", "over HTTP", "HTTP adds"], rows)
