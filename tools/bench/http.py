"""`quire bench http`: what one HTTP process makes of an engine that is never the bottleneck.

The server is the product's, in a process of its own, over an AsyncLLM that answers with the same word for
ever: a turn gives every stream one token, as an engine's step does. The client counts events and parses none.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import psutil

from ...frontend.async_llm import AsyncLLM
from ...frontend.client.async_requests import OutputCollector
from ...frontend.outputs import CompletionOutput, RequestOutput
from ...frontend.requests.input_processor import PreparedParams
from ...ipc.errors import QuireError
from ...ipc.params.sampling_params import SamplingParams
from ...ipc.processes.process import module_command
from ..options import COUNT, option
from .machine import print_machine
from .table import format_table

_MODULE = "quire.tools.bench.http"
_START_TIMEOUT_S = 30.0
_RUN_TIMEOUT_S = 300.0
_WORD = " word"


@dataclass(frozen=True, slots=True)
class Options:
    """Streaming by one HTTP server process, with a fake engine."""

    streams: int = option(32, "streams at the same time (32)", COUNT, metavar="N")
    chunks: int = option(2000, "chunks of a stream (2000)", COUNT, metavar="N")


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """One measurement. server_us, client_us: CPU time a chunk of either process."""

    chunks_per_s: float
    server_us: float
    client_us: float
    rss_mb: float


def run(options: Options) -> int:
    """Measure and print; returns 0."""
    print_machine()
    rows: list[list[str]] = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        cost = asyncio.run(measure_chunk_cost(path, options.streams, options.chunks))
        figures = (f"{cost.chunks_per_s:,.0f}", f"{cost.server_us:.1f}", f"{cost.client_us:.1f}")
        rows.append([path, *figures, f"{cost.rss_mb:.0f}"])
    print(
        format_table(["stream", "chunks/s", "server CPU us/chunk", "client us/chunk", "server RSS MB"], rows)
    )
    print(f"{options.streams} streams of {options.chunks} chunks, one server process, fake engine, loopback")
    return 0


async def measure_chunk_cost(path: str, num_streams: int, num_chunks: int) -> ChunkCost:
    """Start a server, read `num_streams` streams of `num_chunks` chunks at the same time, and end it."""
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        port = listener.getsockname()[1]
        command = module_command(_MODULE, str(listener.fileno()))
        child = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            assert child.stdout is not None
            if not await asyncio.to_thread(child.stdout.readline):
                raise QuireError("the server did not start, see above")
            await _read_streams(port, path, num_streams, 2)
        process, client = psutil.Process(child.pid), psutil.Process()
        before, own_before, began = _cpu_s(process), _cpu_s(client), time.perf_counter()
        async with asyncio.timeout(_RUN_TIMEOUT_S):
            num_read = await _read_streams(port, path, num_streams, num_chunks)
        taken_s = time.perf_counter() - began
        return ChunkCost(
            chunks_per_s=num_read / taken_s,
            server_us=(_cpu_s(process) - before) / num_read * 1e6,
            client_us=(_cpu_s(client) - own_before) / num_read * 1e6,
            rss_mb=process.memory_info().rss / 1e6,
        )
    finally:
        child.terminate()
        child.communicate(timeout=_START_TIMEOUT_S)


async def _read_streams(port: int, path: str, num_streams: int, num_chunks: int) -> int:
    """Events read; raises QuireError when a stream is not as long as it should be."""
    counts = await asyncio.gather(*(_read_stream(port, path, num_chunks) for _ in range(num_streams)))
    # The chat's first event is its role, and both end with [DONE].
    expected = num_chunks + (2 if "chat" in path else 1)
    if set(counts) != {expected}:
        raise QuireError(f"streams of {sorted(set(counts))} events instead of {expected}")
    return sum(counts)


async def _read_stream(port: int, path: str, num_chunks: int) -> int:
    body: dict[str, Any] = {"max_tokens": num_chunks, "stream": True, "ignore_eos": True}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body["prompt"] = [1, 2, 3]
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    num_events = 0
    while part := await reader.read(2**18):
        num_events += part.count(b"data: ")
    writer.close()
    return num_events


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class EndlessLLM:
    """What streaming asks of an AsyncLLM; streams take what a turn brings from collectors, as its own do."""

    errored = False
    is_running = True
    num_engines = 1
    dead_error = None
    output_format = None  # of a model that only writes text

    def __init__(self) -> None:
        from ...frontend.models.model_folder import pocket_folder
        from ...frontend.text.tokenizer import load_tokenizer
        from ...ipc.protocol.messages import EngineFacts

        self.tokenizer = load_tokenizer(pocket_folder())
        facts = SimpleNamespace(served_model_name="bench", tokenizer=str(pocket_folder()), chat_template=None)
        facts.max_model_len = facts.max_num_seqs = 2**20
        facts.vocab_size, facts.tasks = 2048, ("generate",)
        facts.noted = None  # of files that are looked at again
        self.facts = cast(EngineFacts, facts)
        self._live: dict[str, tuple[OutputCollector, int]] = {}
        self._turns: asyncio.Task[None] | None = None

    async def start(self, _on_phase: object = None) -> None:
        """Nothing to start."""

    async def wait_until_dead(self) -> None:
        """It never dies."""
        await asyncio.Event().wait()

    def shutdown(self) -> None:
        """End the turns."""
        if self._turns is not None:
            self._turns.cancel()

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's."""
        return SamplingParams()

    def prepare_params(self, params: SamplingParams) -> PreparedParams:
        """As they are."""
        return PreparedParams("", b"", params, 0.0)

    async def generate(
        self, _prompt: object, prepared: PreparedParams, request_id: str, **_keywords: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """`max_tokens` deltas."""
        params = prepared.sampling_params
        collector = OutputCollector(params.output_kind)
        self._live[request_id] = collector, params.max_tokens or 1
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._take_turns())
        try:
            while True:
                output = await collector.take()
                yield output
                if output.finished:
                    return
        finally:
            self._live.pop(request_id, None)

    async def _take_turns(self) -> None:
        while self._live:
            for request_id, (collector, num_left) in list(self._live.items()):
                if num_left == 0:
                    continue  # its reader has not taken the last one yet
                self._live[request_id] = collector, num_left - 1
                reason = "length" if num_left == 1 else None
                completion = CompletionOutput(0, _WORD, [5], finish_reason=reason)
                collector.put(RequestOutput(request_id, None, [1], None, [completion], num_left == 1))
            await asyncio.sleep(0)  # every reader takes its output
            await asyncio.sleep(0)


def _serve(fd: int) -> int:
    from ...frontend.http.options import ServerOptions
    from ...frontend.http.server import run_server

    def announce(_models: object) -> None:
        print("ready", flush=True)

    llm = cast(AsyncLLM, EndlessLLM())
    return run_server(llm, ServerOptions(), socket.socket(fileno=fd), announce)


if __name__ == "__main__":
    raise SystemExit(_serve(int(sys.argv[1])))
