"""The conversation of a client with its engine (engines.py).

Shared by the sync and async clients; holds no socket of its own and knows nothing of text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..ipc.codec import Codec, make_client_codec
from ..ipc.errors import (
    USER_ERRORS,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ProtocolError,
    raise_remote,
)
from ..ipc.messages import (
    MAX_CLIENT_WEIGHT,
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineFacts,
    Goodbye,
    Hello,
    LeaseCheck,
    Refusal,
    StartupProgress,
    Welcome,
)
from ..ipc.restarts import RestartBudget
from ..ipc.sampling_params import make_plain
from ..ipc.sockets import connect_dealer
from .engines import Engine
from .request_ledger import RequestLedger

RECONNECT_TIMEOUT_S = 600.0  # how long a client waits for a daemon that is there and has no engine
_CLIENT_HIGH_WATER_MARK = 16384  # requests queued in a frontend before add_request waits for the engine
_GOODBYE = make_client_codec().encode(Goodbye())

PhaseCallback = Callable[[str], None]
_log = logging.getLogger(__name__)


class Conversation:
    """The client's side of messages.py without a socket: what to say when, and what answers mean.

    `is_open` from a Welcome until the connection ends. What arrives while it is not is of the past.
    """

    def __init__(
        self,
        engine: Engine,
        client_kind: str = "private",
        weight: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for a weight that the engine would not take."""
        client_kind, weight = make_plain(client_kind), make_plain(weight)
        if not 0.0 < weight <= MAX_CLIENT_WEIGHT:
            raise ConfigError("client_weight", weight, f"a number above 0 and up to {MAX_CLIENT_WEIGHT:g}")
        self._engine = engine
        self._kind = client_kind
        self._weight = weight
        self._clock = clock
        self._number = 0
        self.codec: Codec = make_client_codec()
        self.facts: EngineFacts | None = None
        self._epoch = ""
        self._has_other_engine = False  # than in the conversation before this one
        self.ledger = RequestLedger(clock)
        self.is_open = False
        self._lost_at: float | None = None
        self._garbled = RestartBudget()

    def hello(self) -> tuple[bytes]:
        """What to say on a new connection; no earlier Welcome counts from now on."""
        self._number += 1
        if self._engine.watch is not None:
            self._engine.watch.note_listening()
        if self.facts is not None:
            self._watch_from_now()
        hello = Hello(PROTOCOL_VERSION, self._kind, os.getpid(), self._weight, self._number)
        return self.codec.encode(hello)

    def lose(self) -> None:
        """The connection has ended; the engine may be restarting, or it has dropped this client."""
        if self._engine.watch is not None:
            self._engine.watch.stop()
        self._number += 1  # a Welcome that was on its way is of the past, also before the next Hello
        if self.is_open:
            self.is_open = False
            self._lost_at = self._clock()

    def distrust(self, error: ProtocolError) -> None:
        """A frame does not decode, and what it held is lost: as `lose`, and Hello is to be said again.

        Raises EngineDeadError when that happens too often.
        """
        if self._garbled.note_loss(time.monotonic()) is None:
            raise EngineDeadError(f"the engine sends frames that do not decode: {error}")
        _log.error("from the engine: %s; asking for it again", error)
        self.lose()

    @property
    def next_check_at(self) -> float | None:
        """When `check_silence` is to be called by who waits for the engine; None if it is not watched."""
        return None if self._engine.watch is None else self._engine.watch.next_check_at

    def note_heard(self) -> None:
        """The engine has said something."""
        if self._engine.watch is not None:
            self._engine.watch.note_heard(time.monotonic())

    def check_silence(self) -> bool:
        """Do what the engine's silence calls for. True: send it a PING."""
        return self._engine.watch is not None and self._engine.watch.look(time.monotonic())

    def take_welcome(
        self, socket: zmq.Socket[bytes], frames: list[bytes], on_phase: PhaseCallback | None
    ) -> bool:
        """One message before the conversation is open; True when it is. Raises what a refusal stands for.

        A start that was refused raises as the error that it stands for, a restart as EngineDeadError.
        """
        try:
            message = self.codec.decode(frames)
        except ProtocolError:
            if self.facts is None:
                raise
            return False  # left over from before, as what `distrust` was told of
        if isinstance(message, (Refusal, EngineDead)):
            say_goodbye(socket)
        match message:
            case Welcome(facts=facts, number=number, epoch=epoch) if number == self._number:
                if self.facts is not None:  # what answers may be another daemon of the same name
                    self.raise_if_dead(EngineDeadError)
                self._has_other_engine = self.facts is not None and epoch != self._epoch
                self.facts = facts
                self._epoch = epoch
                self.is_open = True
                self._lost_at = None
                self._watch_from_now()
            case LeaseCheck():
                pass  # another client left just now; it is sent past the answers that wait
            case StartupProgress(phase=phase):
                if on_phase is not None:
                    on_phase(phase)
            case Refusal(kind=kind) if self.facts is not None and kind not in USER_ERRORS:
                pass  # its next start may go well; that there will be none is seen by `exit_fd`
            case Refusal(reason=reason) | EngineDead(reason=reason) if self.facts is not None:
                raise EngineDeadError(reason)
            case Refusal(reason=reason, kind=kind):
                raise_remote(kind, reason)
            case EngineDead(reason=reason):
                raise EngineStartError(reason)
            case _ if self.facts is not None or isinstance(message, Welcome):
                pass  # left over from before the connection ended
            case _:
                raise ProtocolError(f"{type(message).__name__} came before Welcome")
        return self.is_open

    def resume(self) -> list[EngineCoreRequest | AbortRequests]:
        """What is to be sent first in a conversation that was opened again."""
        return self.ledger.resume(self._has_other_engine)

    def take_outputs(self, message: EngineCoreOutputs) -> list[EngineCoreOutput]:
        """Enter what the engine sent in the ledger and return what is to be delivered of it.

        What another life of the engine sent is dropped: `ledger.resume` has asked for it again.
        """
        return self.ledger.take(message.outputs) if message.epoch == self._epoch else []

    def measure_startup(self, facts: EngineFacts) -> list[tuple[str, float]]:
        """The start-up table: rows add up to the time since the engine was asked for."""
        elapsed = time.time() - self._engine.started_at
        if facts.started_at < self._engine.started_at:  # it was there already
            return [("attach", elapsed)]
        known = sum(seconds for _, seconds in facts.startup)
        first = facts.started_at - self._engine.started_at
        return [("start core process", first), *facts.startup, ("handshake", elapsed - first - known)]

    def raise_if_dead(self, error_class: type[Exception]) -> None:
        """Raise when the engine is gone for good, or has been away for longer than any restart takes."""
        end = self._engine.describe_end()
        if end is not None:
            raise error_class(end)
        self.raise_if_away_too_long(error_class)

    def raise_if_away_too_long(self, error_class: type[Exception]) -> None:
        """Raise when there has been no conversation for longer than any restart takes."""
        if self._engine.watch is not None:
            self._engine.watch.check_deadline(time.monotonic())
        if self._lost_at is not None and self._clock() - self._lost_at > RECONNECT_TIMEOUT_S:
            raise error_class(f"no connection to the engine for {RECONNECT_TIMEOUT_S:g} s")

    def _watch_from_now(self) -> None:
        if self._engine.watch is not None:
            self._engine.watch.start(time.monotonic())


def say_goodbye(socket: zmq.Socket[bytes]) -> None:
    """Leave, or answer the engine's last words so that it need not wait. If it is gone, so be it."""
    with contextlib.suppress(zmq.ZMQError):
        socket.send_multipart(_GOODBYE, zmq.NOBLOCK)


def connect(context: zmq.Context[Any], engine: Engine) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER to the engine, on which nothing has been said yet, and the monitor of its connection."""
    socket = context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    connect_dealer(socket, engine.address, high_water_mark=_CLIENT_HIGH_WATER_MARK)
    return socket, monitor


def read_connection_events(monitor: zmq.Socket[bytes]) -> list[bool]:
    """What has happened to the connection since the last call, in order: True up, False down."""
    events: list[bool] = []
    with contextlib.suppress(zmq.Again):
        while True:
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            events.append(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
    return events


def close_all(context: zmq.Context[Any], socket: zmq.Socket[bytes], engine: Engine) -> None:
    """Leave the engine, or end it if it is private, then the sockets; for a finalizer."""
    with contextlib.suppress(EngineDeadError):
        engine.check_owner()
        if engine.linger_ms:
            say_goodbye(socket)
    engine.stop()
    context.destroy(linger=engine.linger_ms)
