"""What every driver of the protocol does, over a transport and with an engine that are played."""

from __future__ import annotations

from collections import deque

import pytest
from fakes import make_request
from frontend_fakes import make_facts
from quire.frontend.client.engine_connection import EngineConnection
from quire.frontend.client.engines import Engine, PlannedRestart
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.ipc.network.keys import ClientKeys
from quire.ipc.protocol.codec import make_client_codec
from quire.ipc.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreRequest,
    Hello,
    StartupProgress,
    UtilityCall,
    UtilityResult,
    Welcome,
)
from quire.ipc.protocol.send_window import MAX_UNREAD_BYTES

CODEC = make_client_codec()
NOW = 100.0


class PlayedTransport:
    """Takes `room` messages; what it was given is `sent`."""

    def __init__(self) -> None:
        self.capacity = 100
        self.sent: list[tuple[bytes]] = []
        self.inbox: deque[list[bytes]] = deque()
        self.events: list[bool] = []

    def send(self, frames: tuple[bytes]) -> bool:
        if len(self.sent) == self.capacity:
            return False
        self.sent.append(frames)
        return True

    def receive(self) -> list[bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def read_connection_events(self) -> list[bool]:
        events, self.events = self.events, []
        return events


class PlayedEngine(Engine):
    """Ends with `end`; is started again `num_restarts` times."""

    end: str | None = None
    num_restarts = 0
    num_starts = 1

    def check_owner(self) -> None:
        pass

    def describe_end(self) -> str | None:
        return self.end

    def plan_restart(self) -> PlannedRestart | None:
        if self.num_starts > self.num_restarts:
            return None
        return PlannedRestart(0.5, self.start)

    def start(self) -> None:
        self.num_starts += 1
        self.end = None

    def stop(self) -> None:
        pass


class Played:
    """An EngineConnection between a played transport and a played engine."""

    def __init__(self) -> None:
        self.transport = PlayedTransport()
        self.engine = PlayedEngine()
        self.connection = EngineConnection(self.engine, self.transport, "test", 1.0)
        self.protocol = self.connection.protocol

    def connect(self) -> None:
        """Say Hello on a new connection, and let a Welcome arrive."""
        self.transport.events.append(True)
        self.connection.send_waiting(NOW)
        hello = CODEC.decode(self.transport.sent[-1])
        assert isinstance(hello, Hello)
        welcome = Welcome(PROTOCOL_VERSION, "epoch", make_facts(), hello.number)
        self.transport.inbox.append([*CODEC.encode(welcome)])

    def read(self) -> None:
        while (frames := self.connection.receive(NOW)) is not None:
            self.connection.take(frames, NOW)

    def names(self) -> list[str]:
        """What was sent: requests, and other messages by their type."""
        messages = [CODEC.decode(frames) for frames in self.transport.sent]
        return [
            one.request_id if isinstance(one, EngineCoreRequest) else type(one).__name__ for one in messages
        ]


@pytest.fixture
def played() -> Played:
    return Played()


def test_a_full_queue_keeps_the_order(played: Played) -> None:
    played.connect()
    played.read()
    played.transport.capacity = 2
    for name in ("a", "b", "c"):
        played.protocol.add_requests([make_request(name, [1])], NOW)
        played.connection.send_waiting(NOW)
    assert played.names() == ["Hello", "a"]
    played.transport.capacity = 100
    played.connection.send_waiting(NOW)
    assert played.names() == ["Hello", "a", "b", "c"]


def test_a_client_looks_at_its_connection_before_it_sends(played: Played) -> None:
    played.connect()
    played.read()
    played.transport.events += [False, True]  # another engine, which has heard no Hello
    played.protocol.add_requests([make_request("a", [1])], NOW)
    played.connection.send_waiting(NOW)
    assert played.names() == ["Hello", "Hello"]


def test_phases_are_told_while_the_engine_starts(played: Played) -> None:
    phases: list[str] = []
    for phase in ("start worker", "start worker", "load weights"):
        played.connection.take([*CODEC.encode(StartupProgress(phase))], NOW, phases.append)
    assert phases == ["start worker", "load weights"]


def test_a_lost_engine_is_started_again_when_it_is_time(played: Played) -> None:
    played.engine.num_restarts = 1
    played.connect()
    played.read()
    played.engine.end = "SIGKILL"
    for _ in range(2):
        played.connection.look_at_engine(NOW)
    assert not played.connection.is_restart_due(NOW + 0.4)
    assert played.connection.is_restart_due(NOW + 0.5)
    played.connection.start_engine()
    assert (played.engine.num_starts, played.connection.is_restart_due(NOW + 9.0)) == (2, False)
    played.protocol.check()


def test_an_engine_that_was_never_ready_is_not_started_again(played: Played) -> None:
    played.engine.num_restarts = 1
    played.engine.end = "code 1"
    played.connection.look_at_engine(NOW)
    with pytest.raises(EngineStartError, match="code 1"):
        played.protocol.check()


def test_another_daemon_of_the_same_name_gets_no_request(played: Played) -> None:
    played.connect()
    played.read()
    played.protocol.add_requests([make_request("a", [1])], NOW)
    played.engine.end = "the daemon has ended"
    played.transport.events.append(False)
    played.connect()
    with pytest.raises(EngineDeadError, match="the daemon has ended"):
        played.read()
    played.connection.send_waiting(NOW)
    assert played.names() == ["Hello", "Hello"]


def test_a_large_batch_for_another_machine_is_sent_no_faster_than_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlayedEngine, "keys", ClientKeys(b"", b"", b""))
    played = Played()
    played.transport.capacity = 1_000_000
    played.connect()
    played.read()
    played.protocol.add_requests([make_request(f"r{n}", [70_000] * 100_000) for n in range(100)], NOW)
    num_read, unread_bytes = 1, []
    while played.protocol.outbox or num_read < len(played.transport.sent):
        played.connection.send_waiting(NOW)
        unread_bytes.append(sum(len(message) for (message,) in played.transport.sent[num_read:]))
        message = CODEC.decode(played.transport.sent[num_read])  # the engine reads one
        num_read += 1
        if isinstance(message, UtilityCall):
            played.transport.inbox.append([*CODEC.encode(UtilityResult(message.call_id))])
            played.read()
    assert MAX_UNREAD_BYTES / 2 < max(unread_bytes) < 1.5 * MAX_UNREAD_BYTES
    assert played.names().count("Hello") == 1
