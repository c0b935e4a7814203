"""What large requests took goes back to the kernel, and large uploads take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.connections import admission
from quire.frontend.http.connections.admission import LARGE_BYTES
from quire.frontend.http.server import Server
from server_fakes import Peer

HEAD = (
    "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    "content-length: {}\r\n\r\n"
)


@pytest.mark.parametrize("is_whole", [False, True])
async def test_large_bodies_have_the_heap_trimmed_whether_they_were_answered_or_cut(
    is_whole: bool, peer: Peer, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, has_trimmed = asyncio.get_running_loop(), asyncio.Event()
    trims: list[None] = []

    def trim() -> None:
        trims.append(None)
        loop.call_soon_threadsafe(has_trimmed.set)

    monkeypatch.setattr(admission, "_TRIM_DELAY_S", 0.0)
    monkeypatch.setattr(admission, "trim_heap", trim)
    body = b'{"prompt":"' + b"a" * LARGE_BYTES + b'"}'
    assert await peer.ask_live()  # which is none of a large one
    one = await peer.make_neighbour()
    await one.say(HEAD.format(len(body)).encode() + body[:-1])
    if is_whole:
        await one.say(body[-1:])
        await one.read_answer()
    else:
        connections: Any = server.connections
        while not any(c.exchange and c.exchange.num_body_bytes == len(body) - 1 for c in connections):
            assert await peer.ask_live()
        one.writer.transport.abort()
    await has_trimmed.wait()
    assert len(trims) == 1


async def test_a_connection_that_sends_much_leaves_others_their_turn(peer: Peer, server: Server) -> None:
    upload = await peer.make_neighbour()
    size = 2**22
    turns: list[bool] = []
    await upload.say(HEAD.format(size).encode())
    assert await peer.ask_live()
    address = upload.writer.get_extra_info("sockname")
    (connection,) = (one for one in server.connections if one.client == address)
    receive = connection.data_received

    def note(data: bytes) -> None:
        receive(data)
        if len(data) >= 2**16:
            turns.append(connection.is_reading_paused)

    connection.data_received = note  # type: ignore[method-assign]
    await upload.say(b" " * size)
    assert (await upload.read_answer())[0] == 400
    assert turns
    assert all(turns)


async def test_a_client_that_sent_much_and_leaves_is_noticed_while_it_is_answered(
    llm: FakeLLM, peer: Peer
) -> None:
    llm.gate.clear()
    body = f'{{"prompt":"a","stream":true{" " * 2**20}}}'
    head = HEAD.format(len(body)).replace("/tokenize", "/v1/completions")
    await peer.say(f"{head}{body}".encode())
    await llm.wait_for_calls(1)
    peer.leave()
    await llm.wait_for_calls(1, 1)
    assert not llm.gate.is_set()  # it ended because the client was seen to leave
