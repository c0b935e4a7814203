"""A client that is a socket and nothing more: what it says and hears are messages, or any bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
import zmq
from quire.ipc.network.keys import ClientKeys
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import PROTOCOL_VERSION, Hello, LeaseCheck, Welcome
from quire.ipc.protocol.sockets import connect_dealer

_TIMEOUT_S = 20.0
CODEC = make_client_codec()


class BareClient:
    """At one engine's address. `keys`: of one over TCP."""

    def __init__(self, address: str, keys: ClientKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = connect_dealer(self._context.socket(zmq.DEALER), address, keys=keys)

    def send(self, *frames: bytes | msgspec.Struct) -> None:
        assert self.socket.poll(1000 * _TIMEOUT_S, zmq.POLLOUT), "it cannot be said"
        encoded = [frame if isinstance(frame, bytes) else CODEC.encode(frame)[0] for frame in frames]
        self.socket.send_multipart(encoded)

    def receive(self) -> msgspec.Struct:
        """The next message; lease checks come whenever somebody else has left."""
        return self.wait_for(lambda message: not isinstance(message, LeaseCheck))

    def wait_for(self, is_it: Callable[[msgspec.Struct], bool]) -> msgspec.Struct:
        """The next message that is it; others are dropped."""
        deadline = time.monotonic() + _TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0 and self.socket.poll(1000 * left_s):
            message = CODEC.decode(self.socket.recv_multipart())
            if is_it(message):
                return message
        raise AssertionError("it has not come")

    def ask(self, *frames: bytes | msgspec.Struct) -> msgspec.Struct:
        self.send(*frames)
        return self.receive()

    def attach(self, number: int = 0) -> Welcome:
        welcome = self.ask(Hello(PROTOCOL_VERSION, "test", os.getpid(), 1.0, number))
        assert isinstance(welcome, Welcome), welcome
        assert welcome.number == number
        return welcome

    def __enter__(self) -> BareClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave without a word."""
        self._context.destroy(linger=0)
