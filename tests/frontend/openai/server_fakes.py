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
from quire.frontend.openai.connections.auth import hash_key
from quire.frontend.openai.limits import Limits
from quire.frontend.openai.options import ServerOptions
from quire.frontend.openai.server import Server


class Peer:
    """A client that says exactly what it is told to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._neighbours: list[Peer] = []

    async def connect(self, receive_buffer: int | None = None) -> None:
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        self.reader, self.writer = await asyncio.open_connection(sock=client, limit=2**24)

    async def make_neighbour(self, receive_buffer: int | None = None) -> Peer:
        """Another connection to the same server; it ends with this one."""
        neighbour = Peer(self.port)
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
    grpc_address: str | None = None,
    **limits: Any,
) -> float:
    """Run a scenario beside a server, then end it with SIGTERM; returns how long the end took."""

    async def main() -> float:
        llm = FakeLLM(tuple("word " for _ in range(pieces)))
        listener = socket.create_server(("127.0.0.1", 0))
        options = ServerOptions(
            drain_timeout_s=drain_timeout_s,
            max_waiting=max_waiting,
            api_key_hashes=tuple(hash_key(key) for key in api_keys),
            limits=Limits(**limits),
            grpc_address=grpc_address,
        )
        server = Server(llm, options)  # type: ignore[arg-type]
        server._state.connections = WatchedSet()
        server._models.only._text = InlineText(llm.tokenizer)  # type: ignore[assignment]
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(listener, lambda _: ready.set()))
        peer = Peer(listener.getsockname()[1])
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
