"""AsyncMPClient over a real socket, whose other end is the test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fakes import make_request
from frontend_fakes import make_facts
from quire.frontend.client.async_engine_core_client import AsyncMPClient
from quire.frontend.client.engine_connection import EngineConnection
from quire.frontend.client.engines import Engine
from quire.ipc.errors import EngineDeadError
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequests,
    FinishReason,
    Hello,
    UtilityMethod,
    Welcome,
)
from quire.ipc.protocol.sockets import bind_router, send_to

CODEC = make_client_codec()
TIMEOUT_S = 30.0
NUM_FRAMES = 200  # more than the client reads ahead, and fewer than the socket holds


class PlayedEngine(Engine):
    """Lives for as long as the test."""

    started_at = 0.0
    linger_ms = 0

    def __init__(self, address: str, index: int = 0) -> None:
        self.address = address
        self.index = index
        self.why_unreachable: str | None = None
        self.exit_fd, self._end = os.pipe()

    @property
    def failure(self) -> str | None:
        return self.why_unreachable

    def check_owner(self) -> None:
        pass

    def describe_end(self) -> str | None:
        return None

    def stop(self) -> None:
        os.close(self._end)


class Core:
    """The socket's other end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self._router = bind_router(context, address)
        self._client = b""

    async def connect(self) -> AsyncMPClient:
        """A client that has been welcomed."""
        client = AsyncMPClient([PlayedEngine(self.address)])
        ready = asyncio.create_task(client.wait_until_ready(TIMEOUT_S))
        hello = await self.receive()
        assert isinstance(hello, Hello)
        self.send(Welcome(PROTOCOL_VERSION, "epoch", make_facts(), hello.number))
        await ready
        return client

    async def receive(self) -> object:
        """The next message."""
        assert await asyncio.to_thread(self._router.poll, int(1000 * TIMEOUT_S)), "the client says nothing"
        self._client, *frames = self._router.recv_multipart()
        return CODEC.decode(frames)

    def send(self, message: msgspec.Struct) -> None:
        send_to(self._router, self._client, CODEC.encode(message))


@pytest.fixture
def core(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Core]:  # noqa: ARG001
    """Ends before the event loop does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield Core(context, f"ipc://{tmp_path}/core")
    context.destroy(linger=0)


@pytest.fixture
def client(runner: asyncio.Runner, core: Core) -> Iterator[AsyncMPClient]:
    """One that has been welcomed."""
    client = runner.run(core.connect())
    yield client
    client.close()


async def test_a_reader_that_is_behind_gets_what_waits_in_the_socket(
    core: Core, client: AsyncMPClient
) -> None:
    client.add_request(make_request("a", [1]))
    await core.receive()
    for position in range(NUM_FRAMES):
        core.send(EngineCoreOutputs([EngineCoreOutput("a", position, [position])], "epoch"))
    tokens: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(tokens) < NUM_FRAMES:
            tokens += [token for output in await client.get_outputs() for token in output.new_token_ids]
    assert tokens == list(range(NUM_FRAMES))


async def test_what_is_added_soon_shares_a_message_and_comes_before_its_abort(
    core: Core, client: AsyncMPClient
) -> None:
    client.add_requests_soon([make_request("a", [1])])
    client.add_requests_soon([make_request("b", [1]), make_request("c", [1])])
    message = await core.receive()
    assert isinstance(message, EngineCoreRequests)
    assert [one.request_id for one in message.requests] == ["a", "b", "c"]
    client.add_requests_soon([make_request("d", [1])])
    client.abort_requests(["d"])
    message, abort = await core.receive(), await core.receive()
    assert isinstance(message, EngineCoreRequest)
    assert isinstance(abort, AbortRequests)
    assert [message.request_id] == abort.request_ids == ["d"]


async def test_of_requests_that_share_a_message_one_that_cannot_be_sent_fails_alone(
    core: Core, client: AsyncMPClient
) -> None:
    bad = make_request("bad", [1], cache_salt="\ud800")  # not to be encoded
    client.add_requests_soon([make_request("a", [1]), bad, make_request("b", [1])])
    async with asyncio.timeout(TIMEOUT_S):
        (failed,) = await client.get_outputs()
    assert (failed.request_id, failed.finish_reason) == ("bad", FinishReason.ERROR)
    assert "surrogates not allowed" in str(failed.error)
    sent = [await core.receive(), await core.receive()]
    assert [one.request_id for one in sent if isinstance(one, EngineCoreRequest)] == ["a", "b"]


async def test_what_fails_in_a_callback_of_the_loop_is_told_to_all_who_wait(
    core: Core, client: AsyncMPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(client.get_outputs())]
    waiting.append(asyncio.ensure_future(client.call_utility(UtilityMethod.STATS)))
    await core.receive()
    monkeypatch.setattr(EngineConnection, "receive", lambda _self, _now: 1 / 0)
    core.send(EngineCoreOutputs([EngineCoreOutput("a", 0, [1])], "epoch"))
    async with asyncio.timeout(TIMEOUT_S):
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [EngineDeadError] * 2
    assert all("ZeroDivisionError" in str(end) for end in ends)


async def test_an_engine_whose_failure_is_seen_while_something_is_sent_is_lost_to_the_others(
    core: Core, tmp_path: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engines = [PlayedEngine(core.address), PlayedEngine(f"ipc://{tmp_path}/other", 1)]
    other = Core(context, engines[1].address)
    client = AsyncMPClient(engines)
    ready = asyncio.create_task(client.wait_until_ready(TIMEOUT_S))
    for one in (core, other):
        hello = await one.receive()
        assert isinstance(hello, Hello)
        one.send(Welcome(PROTOCOL_VERSION, "epoch", make_facts(), hello.number))
    await ready
    context.destroy(linger=0)
    async with asyncio.timeout(TIMEOUT_S):
        while len(client.engines) == 2:
            await asyncio.sleep(0)
    engines[1].why_unreachable = "it does not have this key"
    client.add_request(make_request("a", [1]))
    assert client.num_engines == 1
    client.close()


async def test_a_call_of_an_engine_that_is_gone_fails_as_one_that_is_lost_meanwhile(
    client: AsyncMPClient,
) -> None:
    with pytest.raises(EngineDeadError, match="engine 7 is gone"):
        await client.call_utility(UtilityMethod.STATS, 7)
