"""AsyncMPClient: the EngineCoreClient of an event loop. Owns an engine core process, as SyncMPClient does.

A ZeroMQ socket's descriptor is edge-triggered, and every call on the socket, also a send, may swallow the
edge. So one rule holds here: nothing but `_pump` touches the socket, and it goes on until both ways are dry.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections import deque
from typing import cast

import msgspec
import zmq

from ..ipc.config import EngineConfig
from ..ipc.errors import EngineDeadError, EngineStartError, ProtocolError, QuireError
from ..ipc.messages import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDead,
    ProtocolNotice,
    Refusal,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from .engine_core_client import UTILITY_TIMEOUT_S, EngineCoreClient
from .engine_link import (
    LAST_WORDS_MS,
    Conversation,
    EngineProcess,
    PhaseCallback,
    close_all,
    connect,
    say_goodbye,
)

_MAX_INBOX = 64  # messages read ahead of the consumer; more stay in the socket, whose limit the engine sees


async def make_async_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> AsyncMPClient:
    """Start a private engine and wait until it is ready. Raises ModelError, ConfigError, EngineStartError.

    The engine core is a process of its own in every case.
    """
    client = AsyncMPClient(config)
    await client.wait_until_ready(on_phase)
    return client


class AsyncMPClient(EngineCoreClient):
    """Used from one event loop. `make_async_client` makes one that is ready."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine = EngineProcess(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._finalizer = weakref.finalize(self, close_all, self._context, self._engine)
        self._conversation = Conversation(self._engine)
        self._codec = self._conversation.codec
        self._socket = connect(self._context, self._engine)
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._inbox: deque[list[bytes]] = deque()
        self._has_news = asyncio.Event()  # the inbox has grown, or the engine has ended
        self._has_ended = False
        self._call_ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[UtilityResult]] = {}
        self._loop = asyncio.get_running_loop()
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._pump)
        self._loop.add_reader(self._engine.child.pid_fd, self._on_engine_exit)

    async def wait_until_ready(self, on_phase: PhaseCallback | None = None) -> None:
        """Start-up's other half. Raises like `make_async_client`, and then has ended the engine."""
        timeout_s = self._config.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self._outbox.append(self._conversation.hello())
                self._pump()
                is_ready = False
                while not is_ready:
                    frames = await self._receive(EngineStartError)
                    is_ready = self._conversation.take_welcome(self._socket, frames, on_phase)
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
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(AbortRequests(request_ids))

    async def get_outputs(self) -> list[EngineCoreOutput]:
        """Wait for outputs; called by one task only, which also resolves utility calls.

        Raises EngineDeadError with the cause when the engine has ended.
        """
        while True:
            match self._codec.decode(await self._receive(EngineDeadError)):
                case EngineCoreOutputs(outputs=outputs):
                    return outputs
                case UtilityResult() as result:
                    answer = self._answers.pop(result.call_id, None)
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
        call = UtilityCall(next(self._call_ids), method)
        answer = self._answers[call.call_id] = self._loop.create_future()
        self._send(call)
        try:
            async with asyncio.timeout(UTILITY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise EngineDeadError(f"no answer to {method.name} within {UTILITY_TIMEOUT_S:g} s") from None
        finally:
            self._answers.pop(call.call_id, None)

    def close(self) -> None:
        if self._finalizer.alive:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._loop.remove_reader(self._engine.child.pid_fd)
                self._loop.remove_reader(self._fd)
        self._has_ended = True
        self._has_news.set()
        self._finalizer()

    def _send(self, message: msgspec.Struct) -> None:
        self._engine.check_owner()
        if self._has_ended:
            raise EngineDeadError(self._engine.child.describe_exit())
        self._outbox.append(self._codec.encode(message))
        self._pump()

    async def _receive(self, error_class: type[QuireError]) -> list[bytes]:
        """The next message's frames. Raises `error_class` with the exit's description when none can come."""
        while not self._inbox:
            self._engine.check_owner()
            if self._has_ended:
                self._conversation.raise_if_dead(error_class)
                raise error_class("the engine was closed")
            self._has_news.clear()
            await self._has_news.wait()
        frames = self._inbox.popleft()
        if not self._inbox and not self._has_ended:
            self._pump()
        return frames

    def _pump(self) -> None:
        """Send and receive until neither goes on: only then does the socket raise its edge again."""
        while True:
            with contextlib.suppress(zmq.Again):
                while self._outbox:
                    self._socket.send_multipart(self._outbox[0], zmq.NOBLOCK)
                    self._outbox.popleft()
            with contextlib.suppress(zmq.Again):
                while len(self._inbox) < _MAX_INBOX:
                    self._inbox.append(self._socket.recv_multipart(zmq.NOBLOCK))
            # Asking for the events handles whatever came meanwhile, which a send or receive may put off.
            events = cast(int, self._socket.getsockopt(zmq.EVENTS))
            can_send = events & zmq.POLLOUT and self._outbox
            can_receive = events & zmq.POLLIN and len(self._inbox) < _MAX_INBOX
            if not (can_send or can_receive):
                break
        if self._inbox:
            self._has_news.set()

    def _on_engine_exit(self) -> None:
        self._loop.remove_reader(self._engine.child.pid_fd)
        self._loop.call_later(LAST_WORDS_MS / 1000, self._end)

    def _end(self) -> None:
        if not self._finalizer.alive:
            return
        self._pump()
        self._has_ended = True
        self._has_news.set()
