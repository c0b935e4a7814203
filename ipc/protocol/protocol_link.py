"""ProtocolLink: the plainest driver of ClientProtocol, a DEALER to one engine that its owner polls.

For those who look or supervise; frontends with requests have drivers of their own, which notice at once that
a connection has ended.
"""

from __future__ import annotations

import contextlib

import zmq

from .client_protocol import ClientProtocol
from .sockets import connect_dealer


class ProtocolLink:
    """One connection to one engine. Nothing here waits."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        client_kind: str,
        identity: bytes | None = None,
    ) -> None:
        self.socket = connect_dealer(context.socket(zmq.DEALER), address, identity)
        self.protocol = ClientProtocol(client_kind)
        self.has_connected = False

    def connect(self, now: float) -> None:
        """Say Hello if the engine listens by now."""
        if not self.has_connected and self.socket.poll(0, zmq.POLLOUT):
            self.has_connected = True
            self.protocol.connection_made(now)

    def receive(self, now: float) -> bool:
        """Take the next message in, False if there is none. Raises what it stands for."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.protocol.note_heard(now)
        self.protocol.frames_received(frames, now)
        return True

    def send_waiting(self) -> None:
        """Send what waits to be sent, as far as the engine takes it."""
        outbox = self.protocol.outbox
        with contextlib.suppress(zmq.ZMQError):
            while outbox:
                self.socket.send_multipart(outbox[0], zmq.NOBLOCK)
                outbox.popleft()
