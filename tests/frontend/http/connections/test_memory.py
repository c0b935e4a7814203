"""What large requests took goes back to the kernel."""

from __future__ import annotations

import asyncio

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.connections import admission
from quire.frontend.http.connections.admission import LARGE_BYTES, MemoryTrimmer
from quire.frontend.http.connections.connection import Connection
from quire.frontend.http.server import Server
from server_fakes import Peer, run_with_server


def test_large_requests_have_the_heap_trimmed_once_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> int:
        num_trims, has_trimmed = 0, asyncio.Event()
        loop = asyncio.get_running_loop()

        def trim() -> None:
            nonlocal num_trims
            num_trims += 1
            loop.call_soon_threadsafe(has_trimmed.set)

        monkeypatch.setattr(admission, "_DELAY_S", 0.05)
        monkeypatch.setattr(admission, "trim_heap", trim)
        trimmer = MemoryTrimmer()
        trimmer.note_ended(LARGE_BYTES - 1)
        for _ in range(2):  # the second is after the first round
            trimmer.note_ended(LARGE_BYTES)
            trimmer.note_ended(LARGE_BYTES)
            await has_trimmed.wait()
            has_trimmed.clear()
        return num_trims

    assert asyncio.run(scenario()) == 2


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_end_of_a_large_body_is_noted_whether_it_was_answered_or_cut(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    has_noted = asyncio.Event()

    def note(_: MemoryTrimmer, size_bytes: int) -> None:
        if size_bytes:
            noted.append(size_bytes)
            has_noted.set()

    monkeypatch.setattr(MemoryTrimmer, "note_ended", note)
    body = b'{"prompt":"' + b"a" * LARGE_BYTES + b'"}'
    has_all_but_the_end = asyncio.Event()
    on_body = Connection.on_body

    def look(self: Connection, part: bytes) -> None:
        on_body(self, part)
        if self.exchanges[0].num_body_bytes >= len(body) - 1:
            has_all_but_the_end.set()

    monkeypatch.setattr(Connection, "on_body", look)

    async def scenario(_llm: FakeLLM, peer: Peer, _: Server) -> None:
        head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        await peer.say(f"{head}content-type: application/json\r\n\r\n".encode() + body[:-1])
        await has_all_but_the_end.wait()
        if is_whole:
            await peer.say(body[-1:])
            await peer.read_answer()
        else:
            peer.writer.close()
        await has_noted.wait()

    run_with_server(scenario)
    assert max(noted) == len(body) - (0 if is_whole else 1)
