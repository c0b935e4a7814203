"""Connections that send much take turns."""

from __future__ import annotations

import asyncio

from openai_fakes import FakeLLM
from quire.frontend.http.connections.admission import ReadTurns
from quire.frontend.http.server import Server
from server_fakes import Peer, run_with_server


class Reader:
    def __init__(self) -> None:
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def continue_reading(self) -> None:
        self.is_paused = False


def test_a_few_large_readers_go_on_in_each_turn_and_small_ones_at_once() -> None:
    async def scenario() -> list[int]:
        turns, readers, small = ReadTurns(), [Reader() for _ in range(10)], Reader()
        for reader in readers:
            turns.note_read(reader, 2**18)
        turns.note_read(small, 2**10)
        assert all(reader.is_paused for reader in readers)
        assert not small.is_paused
        num_paused: list[int] = []
        while any(reader.is_paused for reader in readers):
            await asyncio.sleep(0)
            num_paused.append(sum(reader.is_paused for reader in readers))
        turns.note_read(readers[0], 2**18)  # after a pause it begins again
        await asyncio.sleep(0)
        assert not readers[0].is_paused
        return num_paused

    assert asyncio.run(scenario()) == [6, 2, 0]


def test_a_client_that_sent_much_and_leaves_is_noticed_while_it_is_answered() -> None:
    async def scenario(llm: FakeLLM, peer: Peer, _server: Server) -> None:
        llm.gate.clear()
        prompt = "a" * 100
        padding = " " * 2**20
        body = f'{{"prompt":"{prompt}","stream":true{padding}}}'.encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        await peer.say(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + body)
        await llm.wait_for_calls(1)
        peer.leave()
        await llm.wait_for_calls(1, 1)
        assert not llm.gate.is_set()  # it ended because the client was seen to leave

    run_with_server(scenario)
