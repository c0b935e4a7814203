"""EngineCoreClients: a frontend's tie to an engine core, private to it. Three of them:

SyncMPClient and AsyncMPClient own an engine core process and speak messages.py with it over a socket;
InprocClient runs core and worker in the calling process (debugging; loads torch there).
A client knows requests and outputs, not what they mean: text, parents and deltas are the processors' work.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ..ipc.codec import Codec, make_client_codec
from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, ProtocolError, QuireError, raise_remote
from ..ipc.launch import CORE_MODULE, CoreLaunch
from ..ipc.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    EngineFacts,
    Goodbye,
    Hello,
    ProtocolNotice,
    Refusal,
    StartupProgress,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    Welcome,
)
from ..ipc.process import ChildProcess
from ..ipc.run_dir import RunDirectory
from ..ipc.sockets import connect_dealer

STOP_GRACE_S = 1.5  # what the core gets to end itself and its worker before it is killed
UTILITY_TIMEOUT_S = 30.0
_CLIENT_HIGH_WATER_MARK = 16384  # requests queued in a frontend before add_request waits for the engine
_LAST_WORDS_MS = 100  # what an ended engine said may still be on its way through the socket
_GOODBYE = make_client_codec().encode(Goodbye())

PhaseCallback = Callable[[str], None]


class EngineCoreClient(ABC):
    """What every client offers. `facts` hold from the moment that it is constructed."""

    facts: EngineFacts
    startup: list[tuple[str, float]]  # (phase, seconds) from the client's construction to ready

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand a request to the engine. Raises EngineDeadError when there is none any more."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests; each live one still gets its final output."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and its processes within 2 s. Idempotent; safe at interpreter exit."""


class SyncClient(EngineCoreClient):
    """A client for a thread that waits: used by LLMEngine, from one thread at a time."""

    @abstractmethod
    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """Wait until the engine has said something, at most `timeout_s`. [] when the time is over.

        Raises EngineDeadError with the cause when the engine has ended.
        """

    @abstractmethod
    def call_utility(self, method: UtilityMethod) -> UtilityResult:
        """Call the engine and wait for the answer. Outputs that arrive meanwhile are kept."""


def make_sync_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> SyncClient:
    """Start a private engine and wait until it is ready. Raises ModelError, ConfigError or
    EngineStartError."""
    if config.parallel.executor_backend == "uni":
        return InprocClient(config, on_phase)
    return SyncMPClient(config, on_phase)


async def make_async_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> AsyncMPClient:
    """Like `make_sync_client` on an event loop. The engine core is a process of its own in every case."""
    client = AsyncMPClient(config)
    await client.wait_until_ready(on_phase)
    return client


class _EngineProcess:
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

    def stop(self) -> None:
        """End everything, unless this is a fork of the owner: what it inherited is not its own."""
        if os.getpid() != self._owner_pid:
            return
        self.child.stop(STOP_GRACE_S)
        self.run_dir.remove()


class _Conversation:
    """The client's side of messages.py without a socket: what to say first, and what answers mean."""

    def __init__(self, engine: _EngineProcess) -> None:
        self._engine = engine
        self.codec: Codec = make_client_codec()
        self.utility_ids = itertools.count(1)
        self.facts: EngineFacts | None = None

    def hello(self) -> tuple[bytes, bytes]:
        return self.codec.encode(Hello(PROTOCOL_VERSION, "private", os.getpid()))

    def take_welcome(
        self, socket: zmq.Socket[bytes], frames: list[bytes], on_phase: PhaseCallback | None
    ) -> bool:
        """One message of the start; True when the engine is ready. Raises what a refusal stands for."""
        message = self.codec.decode(frames)
        if isinstance(message, (Refusal, EngineDead)):
            _say_goodbye(socket)
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


class SyncMPClient(SyncClient):
    """Owns an engine core process; every call is made from one thread at a time."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        self._engine = _EngineProcess(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._finalizer = weakref.finalize(self, _close_all, self._context, self._engine)
        self._conversation = _Conversation(self._engine)
        self._codec = self._conversation.codec
        self._kept: deque[EngineCoreOutput] = deque()
        self._dead_reason: str | None = None
        try:
            self._socket = connect_dealer(
                self._context.socket(zmq.DEALER),
                self._engine.address,
                high_water_mark=_CLIENT_HIGH_WATER_MARK,
            )
            self._poller = zmq.Poller()
            self._poller.register(self._socket, zmq.POLLIN)
            self._poller.register(self._engine.child.pid_fd, zmq.POLLIN)
            self._wait_until_ready(config.ready_timeout_s, on_phase)
        except BaseException:
            self.close()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(AbortRequests(request_ids))

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        if self._kept:
            outputs = list(self._kept)
            self._kept.clear()
            return outputs
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._receive(deadline)
            match message:
                case None:
                    return []
                case EngineCoreOutputs(outputs=outputs):
                    return outputs
                case _:
                    pass  # the answer to a utility call that timed out

    def call_utility(self, method: UtilityMethod) -> UtilityResult:
        call = UtilityCall(next(self._conversation.utility_ids), method)
        self._send(call)
        deadline = time.monotonic() + UTILITY_TIMEOUT_S
        while True:
            match self._receive(deadline):
                case None:
                    raise EngineDeadError(f"no answer to {method.name} within {UTILITY_TIMEOUT_S:g} s")
                case UtilityResult(call_id=call_id) as result if call_id == call.call_id:
                    return result
                case EngineCoreOutputs(outputs=outputs):
                    self._kept.extend(outputs)
                case _:
                    pass

    def close(self) -> None:
        self._finalizer()

    def _wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None) -> None:
        deadline = time.monotonic() + timeout_s
        # With ZMQ_IMMEDIATE the first send waits until the core listens, so it needs the deadline too.
        self._send_frames(self._conversation.hello(), deadline, EngineStartError)
        while True:
            frames = self._receive_frames(deadline, EngineStartError)
            if frames is None:
                raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")
            if self._conversation.take_welcome(self._socket, frames, on_phase):
                break
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        self.startup = self._conversation.measure_startup(self.facts)

    def _send(self, message: msgspec.Struct) -> None:
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)
        self._send_frames(self._codec.encode(message), None, EngineDeadError)

    def _send_frames(
        self, frames: tuple[bytes, bytes], deadline: float | None, error_class: type[QuireError]
    ) -> None:
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._conversation.raise_if_dead(error_class)
                if deadline is not None and time.monotonic() > deadline:
                    raise error_class("the engine does not take messages") from None
                self._socket.poll(5, zmq.POLLOUT)

    def _receive(self, deadline: float | None) -> Any:
        """The next message; None at the deadline. Raises EngineDeadError."""
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)
        try:
            frames = self._receive_frames(deadline, EngineDeadError)
        except EngineDeadError as error:
            self._dead_reason = str(error)
            raise
        message = None if frames is None else self._codec.decode(frames)
        match message:
            case EngineDead(reason=reason) | Refusal(reason=reason):
                _say_goodbye(self._socket)
                self._dead_reason = reason
                raise EngineDeadError(reason)
            case ProtocolNotice(reason=reason):
                raise ProtocolError(reason)
            case _:
                return message

    def _receive_frames(self, deadline: float | None, error_class: type[QuireError]) -> list[bytes] | None:
        while True:
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                pass
            timeout_ms = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(timeout_ms))
            if not ready:
                return None
            if self._socket not in ready and not self._socket.poll(_LAST_WORDS_MS):
                self._conversation.raise_if_dead(error_class)


class AsyncMPClient(EngineCoreClient):
    """Owns an engine core process; used from one event loop. Await `wait_until_ready` first."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine = _EngineProcess(config)
        self._context = zmq.asyncio.Context()
        self._finalizer = weakref.finalize(self, _close_all, self._context, self._engine)
        self._conversation = _Conversation(self._engine)
        self._codec = self._conversation.codec
        self._socket: Any = _connect(self._context, self._engine)
        self._sender: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._backlog: deque[tuple[bytes, bytes]] = deque()
        self._answers: dict[int, asyncio.Future[UtilityResult]] = {}
        self._ended = asyncio.get_running_loop().create_future()
        self._flusher: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(self._engine.child.pid_fd, self._on_engine_ended)

    async def wait_until_ready(self, on_phase: PhaseCallback | None = None) -> None:
        """Start-up's other half. Raises like `make_sync_client`, and then has ended the engine."""
        try:
            async with asyncio.timeout(self._config.ready_timeout_s):
                await self._socket.send_multipart(self._conversation.hello())
                while not self._conversation.take_welcome(
                    self._sender, await self._receive_frames(EngineStartError), on_phase
                ):
                    pass
        except TimeoutError:
            self.close()
            raise EngineStartError(
                f"the engine was not ready within {self._config.ready_timeout_s:g} s"
            ) from None
        except BaseException:
            self.close()
            raise
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        self.startup = self._conversation.measure_startup(self.facts)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(AbortRequests(request_ids))

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for outputs; called by one task only, which also resolves utility calls.

        Raises EngineDeadError with the cause when the engine has ended.
        """
        while True:
            match self._codec.decode(await self._receive_frames(EngineDeadError)):
                case EngineCoreOutputs(outputs=outputs):
                    return outputs
                case UtilityResult() as result:
                    answer = self._answers.pop(result.call_id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(result)
                case EngineDead(reason=reason) | Refusal(reason=reason):
                    _say_goodbye(self._sender)
                    raise EngineDeadError(reason)
                case ProtocolNotice(reason=reason):
                    raise ProtocolError(reason)
                case _:
                    pass

    async def call_utility(self, method: UtilityMethod) -> UtilityResult:
        """Call the engine; the answer comes through the task that runs `get_outputs`."""
        call = UtilityCall(next(self._conversation.utility_ids), method)
        answer = self._answers[call.call_id] = asyncio.get_running_loop().create_future()
        self._send(call)
        try:
            async with asyncio.timeout(UTILITY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise EngineDeadError(f"no answer to {method.name} within {UTILITY_TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(call.call_id, None)

    def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        if self._finalizer.alive:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._ended.get_loop().remove_reader(self._engine.child.pid_fd)
        if not self._ended.done():
            self._ended.cancel()
        self._finalizer()

    def _on_engine_ended(self) -> None:
        self._ended.get_loop().remove_reader(self._engine.child.pid_fd)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _receive_frames(self, error_class: type[QuireError]) -> list[bytes]:
        while True:
            with contextlib.suppress(zmq.Again):
                return self._sender.recv_multipart(zmq.NOBLOCK)
            if self._ended.done() and not await self._socket.poll(_LAST_WORDS_MS):
                self._conversation.raise_if_dead(error_class)
                raise error_class("the engine was closed")
            if self._ended.done():
                continue
            readable = self._socket.poll(None, zmq.POLLIN)
            await asyncio.wait((readable, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not readable.done():
                readable.cancel()

    def _send(self, message: msgspec.Struct) -> None:
        if self._ended.done():
            raise EngineDeadError(self._engine.child.describe_exit())
        self._backlog.append(self._codec.encode(message))
        if self._flusher is None and not self._flush():
            self._flusher = asyncio.get_running_loop().create_task(self._flush_later())

    def _flush(self) -> bool:
        while self._backlog:
            try:
                self._sender.send_multipart(self._backlog[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._backlog.popleft()
        return True

    async def _flush_later(self) -> None:
        while not self._flush():
            await self._socket.poll(100, zmq.POLLOUT)
        self._flusher = None


class InprocClient(SyncClient):
    """Core and worker in this process, one step a call. For debugging: breakpoints and profilers see all."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        started_at = time.time()
        # By name, so that a frontend process that does not ask for this mode never loads core or torch.
        engine = importlib.import_module("..core.inproc_engine", __package__)
        self._engine: Any = engine.InprocEngine(config, on_phase)
        self.facts = self._engine.facts
        self.startup = [*self.facts.startup, ("handshake", 0.0)]
        self.startup.insert(0, ("import core", self.facts.started_at - started_at))

    def add_request(self, request: EngineCoreRequest) -> None:
        self._engine.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._engine.abort_requests(request_ids)

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        del timeout_s
        return self._engine.run_until_outputs()

    def call_utility(self, method: UtilityMethod) -> UtilityResult:
        return self._engine.call_utility(UtilityCall(0, method))

    def close(self) -> None:
        self._engine.close()


def _say_goodbye(socket: zmq.Socket[bytes]) -> None:
    """Answer the engine's last words, so that it need not wait. If it has left already, so be it."""
    with contextlib.suppress(zmq.ZMQError):
        socket.send_multipart(_GOODBYE, zmq.NOBLOCK)


def _connect(context: zmq.Context[Any], engine: _EngineProcess) -> Any:
    socket = context.socket(zmq.DEALER)
    return connect_dealer(socket, engine.address, high_water_mark=_CLIENT_HIGH_WATER_MARK)


def _close_all(context: zmq.Context[Any], engine: _EngineProcess) -> None:
    engine.stop()
    context.destroy(linger=0)
