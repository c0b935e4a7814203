"""How the HTTP processes of a group ask each other for a response, whose id names the process that has it.

One question a connection, over abstract Unix sockets that the group has bound (nobody can delete them, and
the next process in a lost one's place listens on the same). A process that is lost takes its responses along.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Literal

import msgspec

from ....ipc.daemon.daemon_mark import read_peer
from ....ipc.errors import QuireError, shorten
from ..errors import unavailable

_TIMEOUT_S = 5.0  # of a question: the process may be starting, in a lost one's place
_MAX_ASK_BYTES = 4096
_SIZE_BYTES = 4  # before a question; an answer ends with its connection
_MAX_ASKING = 256  # connections that are being answered; more are closed


class PeerSockets(msgspec.Struct, frozen=True):
    """Where the processes of a group are asked: this one's place among them, its socket, everybody's name.

    counts_fd: of the memory in which they count HTTP requests.
    """

    place: int
    listening_fd: int
    names: list[bytes]
    counts_fd: int | None = None


class Ask(msgspec.Struct, frozen=True):
    """A question for the process that has a response. owner: who asks, who sees nothing of others."""

    what: Literal["find", "remove", "cancel"]
    response_id: str
    owner: str


class Found(msgspec.Struct, frozen=True):
    """The answer. response: its JSON; items: JSON lists of its conversation's items, if it has ended."""

    status: Literal["unknown", "running", "ended"]
    response: bytes = b""
    items: tuple[bytes, ...] = ()
    num_items: int = 0


UNKNOWN = Found("unknown")
AnswerAsk = Callable[[Ask], Awaitable[Found]]


def listen_for_peers() -> socket.socket:
    """A socket for one process of a group, whose name the kernel chooses."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen(_MAX_ASKING)
    return listener


class Peers:
    """This process's place among those of its group. `answer`: what it knows of its own responses."""

    def __init__(self, sockets: PeerSockets, answer: AnswerAsk) -> None:
        self.place = sockets.place
        self._names = sockets.names
        self._answer = answer
        self._listener = socket.socket(fileno=os.dup(sockets.listening_fd))
        self._num_asking = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Take the others' questions."""
        self._listener.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listener, limit=_MAX_ASK_BYTES)

    def close(self) -> None:
        """Take no more questions. Idempotent."""
        if self._server is not None:
            self._server.close()

    async def ask(self, place: int, ask: Ask) -> Found:
        """The answer of the process at that place. ApiError 503 when there is none in time."""
        if place >= len(self._names):
            return UNKNOWN
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await _ask(self._names[place], ask)
        except (OSError, TimeoutError, msgspec.DecodeError):
            message = (
                f"previous responses: the HTTP process that has {shorten(ask.response_id)} does not answer"
            )
            raise unavailable(message, "recovering") from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        self._num_asking += 1
        try:
            if self._num_asking > _MAX_ASKING or read_peer(connection)[1] != os.getuid():
                return
            async with asyncio.timeout(_TIMEOUT_S):
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
                if size <= _MAX_ASK_BYTES:
                    ask = msgspec.msgpack.decode(await reader.readexactly(size), type=Ask)
                    writer.write(msgspec.msgpack.encode(await self._answer(ask)))
                    await writer.drain()
        except (OSError, TimeoutError, EOFError, msgspec.MsgspecError, QuireError):
            pass  # who asked is gone, or was none of ours; or the engine is, which our own clients are told
        finally:
            self._num_asking -= 1
            writer.close()


async def _ask(name: bytes, ask: Ask) -> Found:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, name)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise
    with closing(writer):
        body = msgspec.msgpack.encode(ask)
        writer.write(len(body).to_bytes(_SIZE_BYTES) + body)
        return msgspec.msgpack.decode(await reader.read(-1), type=Found)
