"""What large requests took goes back to the kernel, and large uploads take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
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


async def test_of_many_large_uploads_a_few_are_read_in_a_pass_of_the_loop(peer: Peer, server: Server) -> None:
    loop = asyncio.get_running_loop()
    num_passes, size = 0, 2**21
    reads: Counter[int] = Counter()  # by the pass in which they are done: each connection's but for its first

    def count_pass() -> None:
        nonlocal num_passes
        num_passes += 1
        loop.call_soon(count_pass)

    def watch(connection: Any) -> None:
        receive, has_read = connection.data_received, False

        def note(data: bytes) -> None:
            nonlocal has_read
            receive(data)
            if len(data) >= 2**16:
                reads[num_passes] += has_read
                has_read = True

        connection.data_received = note

    uploads = [await peer.make_neighbour() for _ in range(16)]
    for upload in uploads:
        await upload.say(HEAD.format(size).encode())
    assert await peer.ask_live()
    for connection in server.connections:
        watch(connection)
    count_pass()
    for upload in uploads:
        upload.writer.write(b" " * size)
    for upload in uploads:
        assert (await upload.read_answer())[0] == 400
    assert sum(reads.values()) >= len(uploads)
    assert max(reads.values()) <= 4


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
