"""A ClientProtocol whose frames are messages, for tests of what it says and hears."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from fakes import make_config
from quire.core.stats.engine_facts import StartupClock, make_engine_facts
from quire.ipc.processes.liveness import ChildWatch
from quire.ipc.protocol.client_protocol import ClientProtocol
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreOutput,
    EngineCoreRequests,
    Hello,
    Welcome,
)
from quire.ipc.protocol.step import WorkerReady

FACTS = make_engine_facts(make_config(), WorkerReady(8, "fake", []), {}, StartupClock("start", 0.0))
CODEC = make_client_codec()
GARBLED = [b"\x14junk"]
NOW = 100.0


def unframe(messages: Iterable[msgspec.Struct]) -> list[msgspec.Struct]:
    """With each request of a frame by itself."""
    return [
        one
        for message in messages
        for one in (message.requests if isinstance(message, EngineCoreRequests) else [message])
    ]


class Client:
    """A protocol whose frames are messages; `sent` empties its outbox, as a driver does. Requests that share
    a frame are several messages there.
    """

    def __init__(self, watch: ChildWatch | None = None, *, is_supervised: bool = False) -> None:
        self.protocol = ClientProtocol(is_supervised=is_supervised)
        self.protocol.engine_started(watch)

    def sent(self) -> list[msgspec.Struct]:
        messages = [CODEC.decode(frames) for frames in self.protocol.outbox]
        self.protocol.outbox.clear()
        return unframe(messages)

    def hear(self, message: msgspec.Struct, now: float = NOW) -> list[EngineCoreOutput]:
        return self.protocol.frames_received(list(CODEC.encode(message)), now)

    def connect(self, now: float = NOW) -> int:
        """Make a connection; the number of its Hello, which is all that is sent."""
        self.protocol.connection_made(now)
        (hello,) = self.sent()
        assert isinstance(hello, Hello)
        return hello.number

    def attach(self, epoch: str = "first", now: float = NOW) -> list[msgspec.Struct]:
        """Connect and be welcomed; what is sent then."""
        self.hear(Welcome(PROTOCOL_VERSION, epoch, FACTS, self.connect(now)), now)
        assert self.protocol.is_open
        return self.sent()
