"""A real server on a real socket over a scripted engine, and a client that says exactly what it is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

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


Scenario = Callable[[FakeLLM, Peer, Server], Awaitable[None]]


def run_with_server(
    scenario: Scenario,
    *,
    drain_timeout_s: float = 5.0,
    pieces: int = 3,
    max_waiting: int = 2048,
    api_keys: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
    listener: socket.socket | None = None,
    **limits: Any,
) -> float:
    """Run a scenario beside a server, then end it with SIGTERM; returns how long the end took.

    options: more of ServerOptions'. listener: where it listens, in place of a port of its own.
    """

    async def main() -> float:
        llm = FakeLLM(tuple("word " for _ in range(pieces)))
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
        server._models.only._text = InlineText(llm.tokenizer)  # type: ignore[assignment]
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(listening_socket, lambda _: ready.set()))
        address = listening_socket.getsockname()
        peer = Peer(address[1] if isinstance(address, tuple) else address)
        async with asyncio.timeout(30):
            await ready.wait()
            await peer.connect()
            try:
                await scenario(llm, peer, server)
                began = time.monotonic()
                if not serving.done():
                    os.kill(os.getpid(), signal.SIGTERM)
                assert await serving == 0
            finally:
                peer.leave()
        assert llm.num_shutdowns == 1
        assert len(llm.ended) == len(llm.calls)
        return time.monotonic() - began

    return asyncio.run(main())
