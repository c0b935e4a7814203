"""A real server on a real socket over a scripted engine, and a client that says exactly what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from openai_fakes import FakeLLM, InlineText
from quire.frontend.http.connections.auth import hash_key
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.server import Server


class Peer:
    """A client that says exactly what it is told to."""

    def __init__(self, address: int | str) -> None:
        """`address`: a port, or the path of a Unix socket."""
        self.address = address
        self._neighbours: list[Peer] = []

    async def connect(self, receive_buffer: int | None = None) -> None:
        is_unix = isinstance(self.address, str)
        client = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(
            client, self.address if is_unix else ("127.0.0.1", self.address)
        )
        self.reader, self.writer = await asyncio.open_connection(sock=client, limit=2**24)

    async def make_neighbour(self, receive_buffer: int | None = None) -> Peer:
        """Another connection to the same server; it ends with this one."""
        neighbour = Peer(self.address)
        await neighbour.connect(receive_buffer)
        self._neighbours.append(neighbour)
        return neighbour

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: Any, more_headers: str = "") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{more_headers}"
        await self.say(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    async def read_answer(self) -> tuple[int, str, str]:
        """Status, headers and body of an answer with a length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        return int(head.split()[1]), head, (await self.reader.readexactly(length)).decode()

    async def ask_live(self) -> bool:
        """Whether the server answers; it has then read what others sent before."""
        await self.say(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return (await self.read_answer())[0] == 200

    async def read_all(self) -> bytes:
        """Everything until the server ends the connection."""
        return await self.reader.read(-1)

    def leave(self) -> None:
        self.writer.transport.abort()
        for neighbour in self._neighbours:
            neighbour.leave()


class WatchedSet(set[Any]):
    """A set that says when its last element has left it."""

    def __init__(self) -> None:
        super().__init__()
        self.emptied = asyncio.Event()

    def discard(self, element: Any) -> None:
        super().discard(element)
        if not self:
            self.emptied.set()


def watch_drain(server: Server) -> asyncio.Event:
    """Set when the server begins to end."""
    draining = asyncio.Event()
    server._models.parts.on_drain.append(draining.set)
    return draining


@dataclass
class RunningServer:
    """A server, its engine, and a client that has connected to it."""

    llm: FakeLLM
    peer: Peer
    server: Server
    serving: asyncio.Task[int]

    async def stop(self) -> None:
        """End it with SIGTERM. Then no request is left."""
        try:
            async with asyncio.timeout(30):
                if not self.serving.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                assert await self.serving == 0
        finally:
            self.peer.leave()
        assert self.llm.num_shutdowns == 1
        assert len(self.llm.ended) == len(self.llm.calls)


class OpenServer(Protocol):
    """Starts another server, as `start_server`; it ends with the test."""

    async def __call__(self, **how: Any) -> RunningServer: ...


async def start_server(
    *,
    drain_timeout_s: float = 5.0,
    pieces: int = 3,
    max_waiting: int = 2048,
    api_keys: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
    listener: socket.socket | None = None,
    llm: FakeLLM | None = None,
    has_text_processes: bool = False,
    **limits: Any,
) -> RunningServer:
    """options: more of ServerOptions'. listener: where it listens, in place of a port of its own."""
    llm = llm or FakeLLM(tuple("word " for _ in range(pieces)))
    listening_socket = listener or socket.create_server(("127.0.0.1", 0))
    server_options = ServerOptions(
        drain_timeout_s=drain_timeout_s,
        max_waiting=max_waiting,
        api_key_hashes=tuple(hash_key(key) for key in api_keys),
        limits=Limits(**limits),
        **(options or {}),
    )
    server = Server(llm, server_options)  # type: ignore[arg-type]
    server.connections = WatchedSet()
    if not has_text_processes:
        server._models.only._text = InlineText(llm.tokenizer)  # type: ignore[assignment]
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(listening_socket, lambda _: ready.set()))
    address = listening_socket.getsockname()
    peer = Peer(address[1] if isinstance(address, tuple) else address)
    async with asyncio.timeout(30):
        await ready.wait()
        await peer.connect()
    return RunningServer(llm, peer, server, serving)


@pytest.fixture
def open_server(runner: asyncio.Runner) -> Iterator[OpenServer]:
    """Starts servers in the event loop of the test."""
    servers: list[RunningServer] = []

    async def open_another(**how: Any) -> RunningServer:
        servers.append(await start_server(**how))
        return servers[-1]

    yield open_another
    for running in servers:
        runner.run(running.stop())


@pytest.fixture
def running(runner: asyncio.Runner, open_server: OpenServer, request: pytest.FixtureRequest) -> RunningServer:
    """The server of this test."""
    return runner.run(open_server(**read_marks(request, "server")))  # type: ignore[arg-type]


@pytest.fixture
def peer(running: RunningServer) -> Peer:
    return running.peer


@pytest.fixture
def server(running: RunningServer) -> Server:
    return running.server


def read_marks(request: pytest.FixtureRequest, name: str) -> dict[str, Any]:
    """What the marks of a test and its module say together, the nearest first."""
    how: dict[str, Any] = {}
    for mark in request.node.iter_markers(name):
        how = mark.kwargs | how
    return how
