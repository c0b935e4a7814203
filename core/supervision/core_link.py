"""CoreLink: the supervisor's driver of ClientProtocol, with one core process."""

from __future__ import annotations

import contextlib

import zmq

from ...ipc.client_protocol import ClientProtocol
from ...ipc.daemon.daemon_state import SUPERVISOR_ROLE
from ...ipc.processes.core_child import CoreChild
from ...ipc.sockets import connect_dealer


class CoreLink:
    """From a core's start until it is lost. Nothing here waits."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], core: CoreChild) -> None:
        self.socket = connect_dealer(context.socket(zmq.DEALER), core.address)
        self.protocol = ClientProtocol(SUPERVISOR_ROLE)
        self.has_connected = False
        self._watch = core.watch if core.is_watched else None
        self.protocol.engine_started(self._watch)

    def connect(self, now: float) -> None:
        """Say Hello if the core listens by now. It is watched while it starts, too.

        An idle core is asked 1.4 times a second, which takes 0.05 % of a core in each of the two processes.
        """
        if self.socket.poll(0, zmq.POLLOUT):
            self.has_connected = True
            self.protocol.connection_made(now)
            if self._watch is not None:
                self._watch.start(now)

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
        """Send what waits to be sent, as far as the core takes it."""
        outbox = self.protocol.outbox
        with contextlib.suppress(zmq.ZMQError):
            while outbox:
                self.socket.send_multipart(outbox[0], zmq.NOBLOCK)
                outbox.popleft()
