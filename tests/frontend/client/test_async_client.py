"""AsyncMPClient over a real socket, whose other end is the test."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import zmq
from fakes import make_request
from frontend_fakes import make_facts
from quire.frontend.client.async_engine_core_client import AsyncMPClient
from quire.frontend.client.engines import Engine
from quire.ipc.codec import make_client_codec
from quire.ipc.messages import PROTOCOL_VERSION, EngineCoreOutput, EngineCoreOutputs, Hello, Welcome
from quire.ipc.sockets import bind_router, send_to

CODEC = make_client_codec()
TIMEOUT_S = 30.0
NUM_FRAMES = 200  # more than the client reads ahead, and fewer than the socket holds


class PlayedEngine(Engine):
    """Lives for as long as the test."""

    started_at = 0.0
    linger_ms = 0

    def __init__(self, address: str) -> None:
        self.address = address
        self.exit_fd, self._end = os.pipe()

    def check_owner(self) -> None:
        pass

    def describe_end(self) -> str | None:
        return None

    def stop(self) -> None:
        os.close(self._end)


def test_a_reader_that_is_behind_gets_what_waits_in_the_socket(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/core"
    router = bind_router(context, address)

    def receive() -> tuple[bytes, object]:
        assert router.poll(int(1000 * TIMEOUT_S)), "the client says nothing"
        identity, *frames = router.recv_multipart()
        return identity, CODEC.decode(frames)

    async def run() -> None:
        client = AsyncMPClient(PlayedEngine(address))
        ready = asyncio.create_task(client.wait_until_ready(TIMEOUT_S))
        identity, hello = await asyncio.to_thread(receive)
        assert isinstance(hello, Hello)
        welcome = Welcome(PROTOCOL_VERSION, "epoch", make_facts(), hello.number)
        send_to(router, identity, CODEC.encode(welcome))
        await ready
        client.add_request(make_request("a", [1]))
        await asyncio.to_thread(receive)
        for position in range(NUM_FRAMES):
            outputs = EngineCoreOutputs([EngineCoreOutput("a", position, [position])], "epoch")
            send_to(router, identity, CODEC.encode(outputs))
        tokens: list[int] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(tokens) < NUM_FRAMES:
                tokens += [token for output in await client.get_outputs() for token in output.new_token_ids]
        assert tokens == list(range(NUM_FRAMES))
        client.close()

    try:
        asyncio.run(run())
    finally:
        context.destroy(linger=0)
