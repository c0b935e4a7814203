"""What a daemon's engines show at this moment: a short conversation with each, with all at the same time."""

from __future__ import annotations

import time
from collections.abc import Mapping

import zmq

from ...ipc.client_protocol import GOODBYE
from ...ipc.due import until_ms
from ...ipc.engine_views import EngineSnapshot
from ...ipc.errors import QuireError
from ...ipc.messages import EngineFacts, UtilityMethod
from ...ipc.protocol_link import ProtocolLink

_CONNECT_POLL_MS = 10
_LINGER_MS = 200  # for a Goodbye to leave


class EngineLook:
    """What one engine is asked; `facts` and `snapshot` are None while it has not answered."""

    def __init__(self, link: ProtocolLink) -> None:
        self.facts: EngineFacts | None = None
        self.snapshot: EngineSnapshot | None = None
        self.is_over = False
        self.link = link
        self._call_id: int | None = None

    def follow(self, now: float) -> None:
        """Take what has arrived, ask when it is time, and leave with the answer."""
        protocol = self.link.protocol
        if self.is_over:
            return
        try:
            self.link.connect(now)
            while self.link.receive(now):
                pass
        except QuireError:  # it does not start, or it ends: there is nothing to see
            self.is_over = True
        if protocol.is_open and self._call_id is None:
            self._call_id = protocol.start_call(UtilityMethod.SNAPSHOT)
        answer = None if self._call_id is None else protocol.answers.get(self._call_id)
        if answer is not None:
            self.facts, self.snapshot, self.is_over = protocol.facts, answer.snapshot, True
            protocol.outbox.append(GOODBYE)
        self.link.send_waiting()


def look_at_engines(
    addresses: Mapping[int, str], client_kind: str, timeout_s: float
) -> dict[int, EngineLook]:
    """By number: what each shows that answers within `timeout_s`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deadline = time.monotonic() + timeout_s
    try:
        looks = {
            index: EngineLook(ProtocolLink(context, address, client_kind))
            for index, address in addresses.items()
        }
        while time.monotonic() < deadline:
            for look in looks.values():
                look.follow(time.monotonic())
            waiting = [look.link for look in looks.values() if not look.is_over]
            if not waiting:
                break
            poller = zmq.Poller()
            for link in waiting:
                poller.register(link.socket, zmq.POLLIN)
            is_connecting = any(not link.has_connected for link in waiting)
            poller.poll(_CONNECT_POLL_MS if is_connecting else until_ms(deadline))
    finally:
        context.destroy(linger=_LINGER_MS)
    return looks
