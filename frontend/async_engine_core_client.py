"""AsyncMPClient: the EngineCoreClient of an event loop, with an engine of its own or a daemon's.

A ZeroMQ socket's descriptor is edge-triggered, and every call on the socket, also a send, may swallow the
edge. So one rule holds here: nothing but `_pump` touches the socket, and it goes on until both ways are dry.
The monitor of its connection is another socket, drained by `_follow_connection` in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import weakref
from collections import deque
from typing import cast

import msgspec
import zmq

from ..ipc.codec import PING
from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, ProtocolError, QuireError
from ..ipc.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    ProtocolNotice,
    Refusal,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
    make_aborts,
)
from .engine_core_client import ATTACH_TIMEOUT_S, UTILITY_TIMEOUT_S, EngineCoreClient
from .engine_link import (
    Conversation,
    PhaseCallback,
    close_all,
    connect,
    read_connection_events,
    say_goodbye,
)
from .engines import DaemonEngine, Engine, EngineProcess, PlannedRestart

_LOST_CHECK_S = 0.5  # how often a client without a connection looks whether there is an engine at all
_MAX_INBOX = 64  # messages read ahead of the consumer; more stay in the socket, whose limit the engine sees


async def make_async_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> AsyncMPClient:
    """Start a private engine and wait until it is ready. Raises ModelError, ConfigError, EngineStartError.

    The engine core is a process of its own in every case.
    """
    client = AsyncMPClient(EngineProcess(config))
    await client.wait_until_ready(config.ready_timeout_s, on_phase)
    return client


async def attach_async_client(name: str, client_kind: str, weight: float = 1.0) -> AsyncMPClient:
    """Come to a running daemon. Raises DaemonError when there is none of this name."""
    client = AsyncMPClient(DaemonEngine(name), client_kind=client_kind, weight=weight)
    await client.wait_until_ready(ATTACH_TIMEOUT_S)
    return client


class AsyncMPClient(EngineCoreClient):
    """Used from one event loop. The two functions above make one that is ready.

    When the connection ends and the engine (or another one in its place) can be reached again, every
    unfinished request is added again with the tokens that it has, and goes on.
    """

    def __init__(self, engine: Engine, *, client_kind: str = "private", weight: float = 1.0) -> None:
        self._engine = engine
        self._conversation = Conversation(engine, client_kind, weight)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = connect(self._context, engine)
        self._finalizer = weakref.finalize(self, close_all, self._context, self._socket, engine)
        self._ledger = self._conversation.ledger
        self._codec = self._conversation.codec
        self._must_say_hello = False
        self._outbox: deque[tuple[bytes]] = deque()  # of the open conversation only
        self._inbox: deque[list[bytes]] = deque()
        self._has_news = asyncio.Event()  # the inbox has grown, or the engine has ended
        self._has_ended = False
        self._dead_reason: str | None = None  # what `get_outputs` has raised
        self._call_ids = itertools.count(1)
        self._calls: dict[int, tuple[UtilityCall, asyncio.Future[UtilityResult]]] = {}
        self._silence_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._fds = [cast(int, socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]
        self._loop.add_reader(self._fds[0], self._pump)
        self._loop.add_reader(self._fds[1], self._follow_connection)
        self._loop.add_reader(engine.exit_fd, self._on_engine_exit)
        self._follow_connection()

    @property
    def is_connected(self) -> bool:
        """False while the engine is being restarted; requests wait and go on afterwards."""
        return self._conversation.is_open

    async def wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None = None) -> None:
        """Start-up's other half. Raises like `make_async_client`, and then has ended the engine."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._conversation.is_open:
                    frames = await self._receive(EngineStartError)
                    self._conversation.take_welcome(self._socket, frames, on_phase)
        except TimeoutError:
            self.close()
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s") from None
        except BaseException:
            self.close()
            raise
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        self.startup = self._conversation.measure_startup(self.facts)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.check_usable()
        self._ledger.add(request, self._conversation.is_open)
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._ledger.abort(request_ids)
            for message in make_aborts(request_ids):
                self._send(message)

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for outputs; called by one task only, which also resolves utility calls.

        Raises EngineDeadError with the cause when the engine has ended; so does every call that still waits.
        """
        try:
            return await self._receive_outputs()
        except Exception as error:
            self._end_calls(str(error))
            raise

    async def _receive_outputs(self) -> list[EngineCoreOutput]:
        while True:
            frames = await self._receive(EngineDeadError)
            if not self._conversation.is_open:
                if self._conversation.take_welcome(self._socket, frames, None):
                    self._resume()
                continue
            try:
                message = self._codec.decode(frames)
            except ProtocolError as error:
                self._begin_anew(error)
                continue
            match message:
                case EngineCoreOutputs():
                    if outputs := self._conversation.take_outputs(message):
                        return outputs
                case UtilityResult() as result:
                    _, answer = self._calls.pop(result.call_id, (None, None))
                    if answer is not None and not answer.done():
                        answer.set_result(result)
                case EngineDead(reason=reason) | Refusal(reason=reason):
                    say_goodbye(self._socket)
                    raise EngineDeadError(reason)
                case ProtocolNotice(reason=reason):
                    raise ProtocolError(reason)
                case _:
                    pass

    async def call_utility(self, method: UtilityMethod) -> UtilityResult:
        """Call the engine; the answer comes through the task that runs `get_outputs`."""
        self.check_usable()
        call = UtilityCall(next(self._call_ids), method)
        answer: asyncio.Future[UtilityResult] = self._loop.create_future()
        self._calls[call.call_id] = call, answer
        self._send(call)
        try:
            async with asyncio.timeout(UTILITY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise EngineDeadError(f"no answer to {method.name} within {UTILITY_TIMEOUT_S:g} s") from None
        finally:
            self._calls.pop(call.call_id, None)

    def close(self) -> None:
        if self._finalizer.alive:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                for fd in (*self._fds, self._engine.exit_fd):
                    self._loop.remove_reader(fd)
                if self._silence_timer is not None:
                    self._silence_timer.cancel()
        self._has_ended = True
        with contextlib.suppress(RuntimeError):  # as above: then nobody waits any more
            self._has_news.set()
            self._end_calls("the engine was closed")
        self._finalizer()

    def check_usable(self) -> None:
        self._engine.check_owner()
        if self._has_ended or self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason or self._engine.describe_end() or "the engine was closed")

    def _end_calls(self, reason: str) -> None:
        """No answer will come any more."""
        self._dead_reason = self._dead_reason or reason
        for _, answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _send(self, message: msgspec.Struct) -> None:
        """Send soon; while there is no conversation nothing is sent, and `_resume` makes up for it."""
        if self._conversation.is_open:
            self._outbox.append(self._codec.encode(message))
            self._pump()
        self._watch_silence()

    def _begin_anew(self, error: ProtocolError) -> None:
        self._conversation.distrust(error)
        self._outbox.clear()
        self._must_say_hello = True
        self._pump()

    def _watch_silence(self) -> None:
        """While something is awaited, look whether the engine is silent. An idle client has no timer."""
        check_at = self._conversation.next_check_at
        if self._silence_timer is None and check_at is not None and (self._ledger or self._calls):
            after_s = max(0.0, check_at - time.monotonic())
            self._silence_timer = self._loop.call_later(after_s, self._check_silence)

    def _check_silence(self) -> None:
        self._silence_timer = None
        if self._inbox:
            self._conversation.note_heard()  # it is this side that is slow
        if self._conversation.check_silence():
            self._outbox.append(PING)
            self._pump()
        self._watch_silence()

    def _resume(self) -> None:
        assert self._conversation.facts is not None
        self.facts = self._conversation.facts
        calls = [call for call, _ in self._calls.values()]
        self._outbox.extend(map(self._codec.encode, [*self._conversation.resume(), *calls]))
        self._pump()
        self._watch_silence()

    async def _receive(self, error_class: type[QuireError]) -> list[bytes]:
        """The next message's frames. Raises `error_class` with the exit's description when none can come."""
        while not self._inbox:
            self._engine.check_owner()
            if self._has_ended:
                self._conversation.raise_if_dead(error_class)
                raise error_class("the engine was closed")
            self._has_news.clear()
            if self._conversation.is_open:
                await self._has_news.wait()
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOST_CHECK_S):
                    await self._has_news.wait()
            self._conversation.raise_if_away_too_long(error_class)
        frames = self._inbox.popleft()
        if not self._inbox and not self._has_ended:
            self._pump()
        return frames

    def _follow_connection(self) -> None:
        """Learn whether the connection has ended or stands again; a new one begins with Hello."""
        self._note_connection()
        self._pump()

    def _note_connection(self) -> None:
        for is_up in read_connection_events(self._monitor):
            self._must_say_hello = is_up
            if not is_up:
                self._conversation.lose()
                self._outbox.clear()
                self._has_news.set()

    def _pump(self) -> None:
        """Send and receive until neither goes on: only then does the socket raise its edge again."""
        while True:
            with contextlib.suppress(zmq.Again):
                self._send_waiting()
            with contextlib.suppress(zmq.Again):
                while len(self._inbox) < _MAX_INBOX:
                    self._inbox.append(self._socket.recv_multipart(zmq.NOBLOCK))
                    self._conversation.note_heard()
            # Asking for the events handles whatever came meanwhile, which a send or receive may put off.
            events = cast(int, self._socket.getsockopt(zmq.EVENTS))
            can_send = events & zmq.POLLOUT and (self._outbox or self._must_say_hello)
            can_receive = events & zmq.POLLIN and len(self._inbox) < _MAX_INBOX
            if not (can_send or can_receive):
                break
        if self._inbox:
            self._has_news.set()

    def _send_waiting(self) -> None:
        if self._outbox:  # while the loop was busy, another engine may have come that has heard no Hello
            self._note_connection()
        if self._must_say_hello:
            self._socket.send_multipart(self._conversation.hello(), zmq.NOBLOCK)
            self._must_say_hello = False
            self._watch_silence()
        while self._outbox:
            self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
            self._outbox.popleft()

    def _on_engine_exit(self) -> None:
        self._loop.remove_reader(self._engine.exit_fd)
        self._loop.call_later(self._engine.last_words_ms / 1000, self._replace_engine)

    def _replace_engine(self) -> None:
        """Start another engine if this client may, else end."""
        if not self._finalizer.alive:
            return
        self._pump()
        restart = None if self._conversation.facts is None else self._engine.plan_restart()
        if restart is not None:
            self._loop.call_later(restart.after_s, self._start_engine_again, restart)
            return
        self._has_ended = True
        self._has_news.set()

    def _start_engine_again(self, restart: PlannedRestart) -> None:
        if self._finalizer.alive:
            restart.start()
            self._loop.add_reader(self._engine.exit_fd, self._on_engine_exit)
