"""A real server on a real socket over a scripted engine: caps, time-outs, readers that leave, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from typing import Any

import pytest
from openai_fakes import FakeLLM
from quire.frontend.http.options import ServerOptions
from quire.frontend.http.server import Server
from quire.ipc.errors import EngineDeadError
from server_fakes import Peer, RunningServer, WatchedSet, watch_drain

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
STREAM = CHAT | {"stream": True}


_UNFINISHED_BODY = (
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 9\r\n\r\n{"
)


@pytest.mark.server(max_header_s=0.2, max_body_s=0.2)
@pytest.mark.parametrize(
    ("begun", "limit"), [(b"GET / HTTP/1.1\r\nx: y\r\n", "max_header_s"), (_UNFINISHED_BODY, "max_body_s")]
)
async def test_a_request_that_does_not_end_is_answered_with_408(peer: Peer, begun: bytes, limit: str) -> None:
    await peer.say(begun)
    status, _, body = await peer.read_answer()
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (408, "request_timeout")
    assert limit in error["message"]


@pytest.mark.server(max_keep_alive_s=0.3, max_connections=1)
async def test_a_connection_that_says_nothing_is_closed_and_one_too_many_is_refused(
    llm: FakeLLM, peer: Peer
) -> None:
    llm.gate.clear()
    await peer.post("/v1/chat/completions", CHAT)
    await llm.wait_for_calls(1)
    second = await peer.make_neighbour()
    status, _, body = await second.read_answer()
    assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
    second.leave()
    llm.gate.set()
    assert (await peer.read_answer())[0] == 200
    await peer.say(b"\r\n")  # which is no request, and keeps nothing open
    assert await peer.read_all() == b""


@pytest.mark.parametrize("body", [CHAT, STREAM])
@pytest.mark.parametrize("holds_first", [True, False])
async def test_a_client_that_leaves_ends_its_request(
    llm: FakeLLM, peer: Peer, body: Any, holds_first: bool
) -> None:
    llm.gate.clear()
    llm.holds_first = holds_first
    await peer.post("/v1/chat/completions", body)
    await llm.wait_for_calls(1)
    if not holds_first:
        await llm.started.wait()
    peer.leave()
    await llm.wait_for_calls(1, num_ended=1)


@pytest.mark.server(pieces=100_000, write_timeout_s=0.3)
async def test_a_reader_that_does_not_read_is_cut_off_after_the_write_timeout(
    llm: FakeLLM, peer: Peer
) -> None:
    slow = Peer(peer.address)
    await slow.connect(receive_buffer=4096)
    slow.writer.transport.pause_reading()
    await slow.post("/v1/chat/completions", STREAM)
    await llm.wait_for_calls(1, num_ended=1)
    await peer.say(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await peer.read_answer())[0] == 200
    slow.leave()


@pytest.mark.server(write_timeout_s=0.3, max_keep_alive_s=0.3)
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_whole_answer_that_nobody_reads_does_not_keep_its_connection(
    llm: FakeLLM, peer: Peer, server: Server, connection: str
) -> None:
    llm.pieces = ("word " * 4_000_000,)  # past what the kernel takes for a reader that does not read
    slow = Peer(peer.address)
    await slow.connect(receive_buffer=4096)
    slow.writer.transport.pause_reading()
    await slow.post("/v1/chat/completions", CHAT, f"connection: {connection}\r\n")
    await llm.wait_for_calls(1, num_ended=1)
    connections = server.connections
    assert isinstance(connections, WatchedSet)
    await connections.emptied.wait()  # `peer` says nothing and is closed as well
    slow.leave()


async def test_sigterm_lets_a_running_stream_finish_and_refuses_new_ones(
    llm: FakeLLM, peer: Peer, server: Server
) -> None:
    llm.gate.clear()
    late = Peer(peer.address)
    await late.connect()
    await peer.post("/v1/chat/completions", STREAM)
    await llm.started.wait()
    draining = watch_drain(server)
    os.kill(os.getpid(), signal.SIGTERM)
    await draining.wait()
    newcomer = Peer(peer.address)
    await newcomer.connect()
    await newcomer.say(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert (await newcomer.read_answer())[0] == 503
    await newcomer.post("/v1/chat/completions", CHAT)
    status, head, _ = await newcomer.read_answer()
    assert status == 503
    assert "connection: close" in head.lower()
    llm.gate.set()
    assert b"[DONE]" in await peer.read_all()
    newcomer.leave()
    late.leave()


@pytest.mark.server(drain_timeout_s=0.2)
async def test_what_outlives_the_drain_time_ends_with_abort_and_its_text(llm: FakeLLM, peer: Peer) -> None:
    llm.gate.clear()
    await peer.post("/v1/chat/completions", STREAM)
    await llm.started.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    rest = await peer.read_all()
    assert b'"finish_reason":"abort"' in rest
    assert b"[DONE]" in rest


@pytest.mark.server(drain_timeout_s=60)
async def test_a_second_signal_ends_the_drain_at_once(llm: FakeLLM, peer: Peer, server: Server) -> None:
    llm.gate.clear()
    await peer.post("/v1/chat/completions", STREAM)
    await llm.started.wait()
    draining = watch_drain(server)
    os.kill(os.getpid(), signal.SIGINT)
    await draining.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert b"abort" in await peer.read_all()


async def test_a_server_whose_engine_dies_ends_with_the_cause_and_leaves_it_to_its_caller_to_say(
    running: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    running.llm.die(EngineDeadError("killed by signal 9"))
    with pytest.raises(EngineDeadError, match="signal 9"):
        await running.serving
    assert "signal 9" not in caplog.text
    running.serving = asyncio.get_running_loop().create_task(asyncio.sleep(0, 0))  # it has been seen


async def test_an_engine_that_does_not_start_ends_the_server_with_its_error() -> None:
    llm = FakeLLM()

    async def fail(_on_phase: Any = None) -> None:
        raise EngineDeadError("no memory")

    llm.start = fail  # type: ignore[method-assign]
    server = Server(llm, ServerOptions())  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="no memory"):
        await server.serve(socket.create_server(("127.0.0.1", 0)))


@pytest.mark.server(max_header_s=0.4)
async def test_a_head_that_comes_in_pieces_and_does_not_end_has_a_deadline(peer: Peer) -> None:
    assert await peer.ask_live()  # nor does the request before it leave one behind
    neighbour = await peer.make_neighbour()
    for piece in (b"GET /live HTTP/1.1\r\n", b"host: localhost\r\n"):
        await peer.say(piece)
        assert await neighbour.ask_live()  # the piece has been read
    assert (await peer.read_answer())[0] == 408
    await peer.read_all()
