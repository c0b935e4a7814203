"""How the HTTP processes of a group ask each other for a response, whose id names the process that has it.

One question a connection, whose answer is a frame, or frames until an empty one: the events of a response, as
they come. Over abstract Unix sockets that the group has bound (nobody can delete them, and
the next process in a lost one's place listens on the same). A process that is lost takes its responses along.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing
from typing import Literal

import msgspec

from ....ipc.daemon.daemon_mark import read_peer
from ....ipc.decoding import decode_msgpack
from ....ipc.errors import QuireError, shorten
from ..caller import TenantUsage
from ..errors import ApiError, overloaded, unavailable
from .event_log import EventLog

_TIMEOUT_S = 5.0  # of a question: the process may be starting, in a lost one's place
_MAX_ASK_BYTES = 4096
_SIZE_BYTES = 4  # before a question and before each frame of its answer
_MAX_ASKING = 512  # connections that are being answered; more are closed
_MAX_FOLLOWING = 192  # of them, those that are sent events: twice as many where callers share them


class PeerSockets(msgspec.Struct, frozen=True):
    """Where the processes of a group are asked: this one's place among them, its socket, everybody's name.

    counts_fd: of the memory in which they count HTTP requests.
    """

    place: int
    listening_fd: int
    names: list[bytes]
    counts_fd: int | None = None


class ResponseQuery(msgspec.Struct, frozen=True):
    """A question for the process that has a response. owner: who asks, who sees nothing of others.

    number: the first of the events that are to follow.
    """

    what: Literal["find", "remove", "cancel", "follow"]
    response_id: str
    owner: str
    number: int = 0


class ResponseReply(msgspec.Struct, frozen=True):
    """The answer. response: its JSON; items: JSON lists of its conversation's items, if it has ended.

    "events": they follow. "no room": too many are sent some already.
    """

    status: Literal["unknown", "running", "ended", "events", "no room"]
    response: bytes = b""
    items: tuple[bytes, ...] = ()
    num_items: int = 0


UNKNOWN, EVENTS, NO_ROOM = map(ResponseReply, ("unknown", "events", "no room"))
AnswerQuery = Callable[[ResponseQuery], Awaitable[tuple[ResponseReply, EventLog | None]]]
"""What is known here, and the log of the events that are to follow."""


def listen_for_peers() -> socket.socket:
    """A socket for one process of a group, whose name the kernel chooses."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen(_MAX_ASKING)
    return listener


class Peers:
    """This process's place among those of its group. `answer`: what it knows of its own responses."""

    def __init__(self, sockets: PeerSockets, answer: AnswerQuery) -> None:
        self.place = sockets.place
        self._names = sockets.names
        self._answer = answer
        self._following = TenantUsage()  # by owner
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

    async def ask(
        self, place: int, ask: ResponseQuery
    ) -> tuple[ResponseReply, AsyncGenerator[bytes, None] | None]:
        """The answer of the process at that place, and the events that follow it, if some do.

        ApiError 503 when there is none in time, 429 when too many follow others already. Of a process that is
        lost while events come, the generator raises an ApiError.
        """
        if place >= len(self._names):
            return UNKNOWN, None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await _connect(self._names[place])
                try:
                    await _write_frame(writer, msgspec.msgpack.encode(ask))
                    answer = decode_msgpack(await _read_frame(reader), ResponseReply)
                except BaseException:
                    writer.close()
                    raise
        except (OSError, TimeoutError, EOFError, msgspec.DecodeError):
            raise _make_lost(ask.response_id) from None
        if answer.status == "events":
            events = _read_events(reader, writer, ask.response_id)
            await anext(events)  # from here on its end closes the connection, though nobody may read an event
            return answer, events
        writer.close()
        if answer.status == "no room":
            name = shorten(ask.response_id)
            raise overloaded(f"as many streams follow {name} and others as may at a time")
        return answer, None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        self._num_asking += 1
        try:
            if self._num_asking > _MAX_ASKING or read_peer(connection)[1] != os.getuid():
                return
            async with asyncio.timeout(_TIMEOUT_S):
                ask = decode_msgpack(await _read_frame(reader, _MAX_ASK_BYTES), ResponseQuery)
            async with asyncio.timeout(_TIMEOUT_S):
                answer, log = await self._answer(ask)
                if log is not None and not self._following.has_room(ask.owner, 1, _MAX_FOLLOWING):
                    answer, log = NO_ROOM, None
                await _write_frame(writer, msgspec.msgpack.encode(answer))
            if log is not None:
                await self._send_events(log, ask, reader, writer)
        except (OSError, TimeoutError, EOFError, msgspec.MsgspecError, QuireError):
            pass  # who asked is gone, or was none of ours; or the engine is, which our own clients are told
        finally:
            self._num_asking -= 1
            writer.close()

    async def _send_events(
        self, log: EventLog, ask: ResponseQuery, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """All of them, until the last or until who asked is gone."""
        self._following.enter(ask.owner, 1)
        sending = asyncio.ensure_future(_forward(log, ask.number, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._following.leave(ask.owner, 1)
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)


async def _forward(log: EventLog, number: int, writer: asyncio.StreamWriter) -> None:
    async with aclosing(log.follow(number)) as events:
        async for data in events:
            await _write_frame(writer, data)
    await _write_frame(writer, b"")


async def _read_events(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, response_id: str
) -> AsyncGenerator[bytes, None]:
    """`b""` at once, then the events."""
    with closing(writer):
        yield b""
        while True:
            try:
                data = await _read_frame(reader)
            except (OSError, EOFError):
                raise _make_lost(response_id) from None
            if not data:
                return
            yield data


async def _connect(name: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, name)
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


async def _write_frame(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(len(body).to_bytes(_SIZE_BYTES) + body)
    await writer.drain()


async def _read_frame(reader: asyncio.StreamReader, max_bytes: int | None = None) -> bytes:
    size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
    if max_bytes is not None and size > max_bytes:
        raise EOFError
    return await reader.readexactly(size)


def _make_lost(response_id: str) -> ApiError:
    message = f"previous responses: the HTTP process that has {shorten(response_id)} does not answer"
    return unavailable(message, "recovering")
