"""Listener: accepts a server's connections, several in each pass of the event loop.

uvloop's own server accepts one, so that a newcomer would wait a pass for each that came before, and in a
crowd a pass is long.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from .connection import Connection

_ACCEPTS_A_PASS = 16  # 50 us each
_RETRY_S = 1.0  # without descriptors; as asyncio's own server
_logger = logging.getLogger("quire.serve")


class Listener:
    """From construction to `close`, on a socket that it closes then."""

    def __init__(self, listening_socket: socket.socket, make_protocol: Callable[[], Connection]) -> None:
        self._socket = listening_socket
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._socket.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept nothing more; those that are being opened end."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for opening in self._opening:
            opening.cancel()

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_PASS):
            try:
                client, address = self._socket.accept()
            except BlockingIOError:  # no more, or another process was faster
                return
            except ConnectionError:  # the client has gone already
                continue
            except OSError as error:  # no descriptor is left
                _logger.warning("a connection was not accepted: %s", error)
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(_RETRY_S, self._resume)
                return
            client.setblocking(False)
            opening = self._loop.create_task(self._open(client, address))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket, address: object, /) -> None:  # noqa: ARG002
        """Make a transport and a protocol of what was accepted."""
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, client)
        except (OSError, asyncio.CancelledError):
            client.close()
