"""How fast connections are accepted, in passes of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, cast

import uvloop
from quire.frontend.http.connections.listener import Listener

NUM_CONNECTIONS = 100


class Told(asyncio.Protocol):
    """Counts connections."""

    num_made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Told.num_made += 1
        transport.close()


async def count_passes() -> int:
    """From the first pass on until all that waited are accepted."""
    with contextlib.ExitStack() as stack:
        listening = socket.create_server(("127.0.0.1", 0), backlog=2 * NUM_CONNECTIONS)
        for _ in range(NUM_CONNECTIONS):
            stack.enter_context(socket.create_connection(listening.getsockname()))
        listener = Listener(listening, cast(Any, Told))
        stack.callback(listener.close)
        num_passes = 0
        while Told.num_made < NUM_CONNECTIONS:
            assert num_passes < 1000
            await asyncio.sleep(0)
            num_passes += 1
        return num_passes


def test_a_newcomer_does_not_wait_a_pass_for_each_connection_before_it() -> None:
    assert uvloop.run(count_passes()) < NUM_CONNECTIONS / 4


async def test_a_listener_that_is_closed_accepts_nothing() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    Listener(listening, cast(Any, Told)).close()
    with contextlib.closing(socket.socket()) as late:
        assert late.connect_ex(address) != 0
