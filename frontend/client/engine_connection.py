"""A client's connection to its engine: what every driver of ClientProtocol does, whatever it waits with.

EngineSocket is the ZeroMQ transport; the simulator has one of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, cast

import zmq

from ...ipc.errors import EngineDeadError, ModelError
from ...ipc.network.keys import ClientKeys
from ...ipc.protocol.client_protocol import GOODBYE, ClientProtocol
from ...ipc.protocol.messages import EngineCoreOutput
from ...ipc.protocol.send_window import SendWindow
from ...ipc.protocol.sockets import NOBLOCK, connect_dealer, has_message, read_events, receive_event
from .engines import Engine, PlannedRestart
from .handshake_watch import FAILURES, HandshakeWatch

_HIGH_WATER_MARK = 16384  # requests queued in a frontend before add_request waits for the engine

_CONNECTION_EVENTS = (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED)

PhaseCallback = Callable[[str], None]


class Transport(Protocol):
    """Carries frames to and from an engine, and connects again by itself. Nothing here waits."""

    def send(self, frames: tuple[bytes]) -> bool:
        """False if it takes no more for now."""
        ...

    def receive(self) -> list[bytes] | None:
        """The next message that has arrived, None if there is none."""
        ...

    def read_connection_events(self) -> list[bool]:
        """What has happened to the connection since the last call, in order: True made, False lost."""
        ...


class EngineSocket(Transport):
    """A DEALER to an engine, and the monitor of its connection.

    Both descriptors are edge-triggered: one is readable when something has happened since its socket was last
    asked, by whatever call.
    """

    def __init__(
        self, address: str, keys: ClientKeys | None = None, handshakes: HandshakeWatch | None = None
    ) -> None:
        """`keys`, and `handshakes` to be told of connections: of an engine on another machine."""
        self._address = address
        self._handshakes = handshakes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events if keys is None else events | FAILURES)
        connect_dealer(self._socket, address, high_water_mark=_HIGH_WATER_MARK, keys=keys)
        self.fd, self.monitor_fd = (
            cast(int, socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)
        )

    def send(self, frames: tuple[bytes]) -> bool:
        """False if the engine's queue is full, or nobody is connected."""
        try:
            self._socket.send(frames[0], NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(NOBLOCK)
        except zmq.Again:
            return None

    def read_connection_events(self) -> list[bool]:
        events: list[bool] = []
        while has_message(self._monitor):
            event, _ = receive_event(self._monitor)
            if self._handshakes is not None:
                self._handshakes.note(event)
            if event in _CONNECTION_EVENTS:
                events.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return events

    def reconnect(self) -> None:
        """Give up the connection that there is, which may be dead unknown to both sides, and make another."""
        self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    @property
    def events(self) -> int:
        """As `read_events`."""
        return read_events(self._socket)

    def close(self, linger_ms: int) -> None:
        """Idempotent. What was sent last gets so long to leave."""
        if self._handshakes is not None:
            self._handshakes.close()
        self._context.destroy(linger=linger_ms)


class EngineConnection:
    """An engine, the transport to it and the protocol between them. `now` is the monotonic clock's time."""

    def __init__(self, engine: Engine, transport: Transport, client_kind: str, weight: float) -> None:
        """Raises ConfigError for a weight that the engine would not take."""
        self._engine = engine
        self._transport = transport
        self._restart: PlannedRestart | None = None
        window = None if engine.keys is None else SendWindow()
        self.protocol = ClientProtocol(client_kind, weight, is_supervised=not engine.is_own, window=window)
        self.protocol.engine_started(engine.watch)

    def follow_connection(self, now: float) -> None:
        """Learn whether the connection was made or lost."""
        for is_made in self._transport.read_connection_events():
            if is_made:
                self.protocol.connection_made(now)
            else:
                self.protocol.connection_lost(now)
        if (failure := self._engine.failure) is not None:
            self.protocol.end(failure)

    def send_waiting(self, now: float) -> None:
        """Send what waits to be sent, as far as the engine's queue and the window take it."""
        outbox, window = self.protocol.outbox, self.protocol.window
        if outbox or not self.protocol.is_open:  # another engine may have come that has heard no Hello
            self.follow_connection(now)
        while self.may_send:
            if window is not None and (ping := window.make_ping()) is not None:
                if not self._transport.send(ping):
                    break
                window.note_ping()
                continue
            if not self._transport.send(outbox[0]):
                break
            (message,) = outbox.popleft()
            if window is not None:
                window.note_sent(len(message))

    @property
    def may_send(self) -> bool:
        """Whether something waits to be sent that need not wait for an answer of the engine."""
        window = self.protocol.window
        return bool(self.protocol.outbox) and (window is None or not window.is_full)

    def receive(self, now: float) -> list[bytes] | None:
        """The next message that has arrived, to be handed to `take`; None if there is none."""
        frames = self._transport.receive()
        if frames is not None:
            self.protocol.note_heard(now)
        return frames

    def take(
        self, frames: list[bytes], now: float, on_phase: PhaseCallback | None = None
    ) -> list[EngineCoreOutput]:
        """Outputs of one message. Raises as ClientProtocol.frames_received; then too do `send_waiting`."""
        protocol = self.protocol
        if protocol.is_open:
            return protocol.frames_received(frames, now)
        phase = protocol.phase
        outputs = protocol.frames_received(frames, now)
        if on_phase is not None and protocol.phase is not None and protocol.phase != phase:
            on_phase(protocol.phase)
        if protocol.phase is not None or protocol.is_open:
            self._engine.note_index(protocol.engine_index)
        if protocol.is_open:  # what has answered may be another daemon of the same name
            self.look_at_engine(now)
            protocol.check()
            self._check_facts()
        return outputs

    def _check_facts(self) -> None:
        protocol = self.protocol
        assert protocol.facts is not None
        try:
            protocol.facts = self._engine.check_facts(protocol.facts)
        except ModelError as error:
            self.protocol.end(str(error))
            raise

    def look_at_engine(self, now: float) -> None:
        """Tell the protocol if the engine has ended. One that was never ready is not started again."""
        if self.protocol.restart_at is not None or (end := self._engine.describe_end()) is None:
            return
        self._restart = None if self.protocol.facts is None else self._engine.plan_restart()
        after_s = None if self._restart is None else self._restart.after_s
        self.protocol.engine_ended(self._engine.describe_end() or end, after_s, now)

    def is_restart_due(self, now: float) -> bool:
        """Whether `start_engine` is to be called."""
        return self.protocol.restart_at is not None and now >= self.protocol.restart_at

    def start_engine(self) -> None:
        """Start another engine in the place of the one that has ended."""
        assert self._restart is not None
        self._restart.start()
        self.protocol.engine_started(self._engine.watch)


def close_connection(engine: Engine, socket: EngineSocket) -> None:
    """Leave the engine, or end it if it is private; for a finalizer."""
    with contextlib.suppress(EngineDeadError, zmq.ZMQError):
        engine.check_owner()
        if engine.linger_ms:
            socket.send(GOODBYE)
    engine.stop()
    socket.close(engine.linger_ms)
