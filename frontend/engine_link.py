"""A frontend's private engine: its process, its run directory, and the conversation that opens with Hello.

Shared by the sync and async clients; holds no socket of its own and knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ..ipc.codec import Codec, make_client_codec
from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, ProtocolError, QuireError, raise_remote
from ..ipc.launch import CORE_MODULE, CoreLaunch
from ..ipc.messages import (
    PROTOCOL_VERSION,
    EngineDead,
    EngineFacts,
    Goodbye,
    Hello,
    Refusal,
    StartupProgress,
    Welcome,
)
from ..ipc.process import ChildProcess
from ..ipc.run_dir import RunDirectory
from ..ipc.sockets import connect_dealer

STOP_GRACE_S = 1.5  # what the core gets to end itself and its worker before it is killed
LAST_WORDS_MS = 100  # what an ended engine said may still be on its way through the socket
_CLIENT_HIGH_WATER_MARK = 16384  # requests queued in a frontend before add_request waits for the engine
_GOODBYE = make_client_codec().encode(Goodbye())

PhaseCallback = Callable[[str], None]


class EngineProcess:
    """A private engine core: its run directory, process and the way they end."""

    def __init__(self, config: EngineConfig) -> None:
        self.started_at = time.time()
        self.run_dir = RunDirectory.create_private()
        self.address = self.run_dir.address_of("core.sock")
        launch = CoreLaunch(
            client_address=self.address,
            worker_address=self.run_dir.address_of("worker.sock"),
            config=config,
        )
        self.child = ChildProcess.start(CORE_MODULE, "engine-core", msgspec.msgpack.encode(launch))
        self._owner_pid = os.getpid()

    def check_owner(self) -> None:
        """Raise EngineDeadError in a fork of the owner: two processes cannot share one conversation."""
        if os.getpid() != self._owner_pid:
            raise EngineDeadError("this process is a fork of the engine's owner; make an engine of its own")

    def stop(self) -> None:
        """End everything, unless this is a fork of the owner: what it inherited is not its own."""
        if os.getpid() != self._owner_pid:
            return
        self.child.stop(STOP_GRACE_S)
        self.run_dir.remove()


class Conversation:
    """The client's side of messages.py without a socket: what to say first, and what answers mean."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self.codec: Codec = make_client_codec()
        self.facts: EngineFacts | None = None

    def hello(self) -> tuple[bytes, bytes]:
        return self.codec.encode(Hello(PROTOCOL_VERSION, "private", os.getpid()))

    def take_welcome(
        self, socket: zmq.Socket[bytes], frames: list[bytes], on_phase: PhaseCallback | None
    ) -> bool:
        """One message of the start; True when the engine is ready. Raises what a refusal stands for."""
        message = self.codec.decode(frames)
        if isinstance(message, (Refusal, EngineDead)):
            say_goodbye(socket)
        match message:
            case Welcome(facts=facts):
                self.facts = facts
            case StartupProgress(phase=phase):
                if on_phase is not None:
                    on_phase(phase)
            case Refusal(reason=reason, kind=kind):
                raise_remote(kind, reason)
            case EngineDead(reason=reason):
                raise EngineStartError(reason)
            case _:
                raise ProtocolError(f"{type(message).__name__} came before Welcome")
        return self.facts is not None

    def measure_startup(self, facts: EngineFacts) -> list[tuple[str, float]]:
        """The start-up table: rows add up to the time since the engine was asked for."""
        known = sum(seconds for _, seconds in facts.startup)
        first = facts.started_at - self._engine.started_at
        last = time.time() - self._engine.started_at - first - known
        return [("start core process", first), *facts.startup, ("handshake", last)]

    def raise_if_dead(self, error_class: type[QuireError]) -> None:
        if self._engine.child.exit_code is not None:
            raise error_class(self._engine.child.describe_exit())


def say_goodbye(socket: zmq.Socket[bytes]) -> None:
    """Answer the engine's last words, so that it need not wait. If it has left already, so be it."""
    with contextlib.suppress(zmq.ZMQError):
        socket.send_multipart(_GOODBYE, zmq.NOBLOCK)


def connect(context: zmq.Context[Any], engine: EngineProcess) -> zmq.Socket[bytes]:
    """A DEALER to the engine; nothing has been said yet."""
    socket = context.socket(zmq.DEALER)
    return connect_dealer(socket, engine.address, high_water_mark=_CLIENT_HIGH_WATER_MARK)


def close_all(context: zmq.Context[Any], engine: EngineProcess) -> None:
    """End the engine, then the sockets; for a finalizer."""
    engine.stop()
    context.destroy(linger=0)
