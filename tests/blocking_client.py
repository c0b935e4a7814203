"""An engine client for tests that wait: its loop is in a thread, and it reads only when asked for outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from quire.frontend.client.async_engine_core_client import (
    ATTACH_TIMEOUT_S,
    UTILITY_TIMEOUT_S,
    AsyncMPClient,
    make_async_client,
)
from quire.frontend.client.engine_connection import PhaseCallback
from quire.frontend.client.loop_thread import LoopThread
from quire.frontend.client.remote_daemon import Attachment, find_daemon_engines
from quire.ipc.errors import EngineDeadError
from quire.ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineFacts,
    UtilityMethod,
    UtilityResult,
)
from quire.ipc.spec.config import EngineConfig

T = TypeVar("T")


class BlockingClient:
    """`client` is the one that it waits for."""

    def __init__(self, loop: LoopThread, client: AsyncMPClient) -> None:
        self.client = client
        self._loop = loop
        self._kept: list[EngineCoreOutput] = []

    @property
    def facts(self) -> EngineFacts:
        return self.client.facts

    @property
    def engines(self) -> dict[int, EngineFacts]:
        return self.client.engines

    @property
    def startup(self) -> list[tuple[str, float]]:
        return self.client.startup

    def check_usable(self) -> None:
        self.client.check_usable()

    def add_request(self, request: EngineCoreRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._loop.call(self.client.add_requests, requests)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._loop.call(self.client.abort_requests, request_ids)

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        self._loop.call(self.client.abort_named, names, tenant)

    def get_outputs(self, timeout_s: float | None = None) -> list[EngineCoreOutput]:
        """Wait for outputs, at most `timeout_s`; [] when the time is over."""
        if self._kept:
            kept, self._kept = self._kept, []
            return kept

        async def get() -> list[EngineCoreOutput]:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.client.get_outputs()
            except TimeoutError:
                return []

        return self._loop.run(get)

    def call_utility(
        self, method: UtilityMethod, timeout_s: float = UTILITY_TIMEOUT_S, engine: int | None = None
    ) -> UtilityResult:
        """Call an engine and wait for the answer."""
        return self.run(lambda: self.client.call_utility(method, engine), timeout_s)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = UTILITY_TIMEOUT_S) -> T:
        """Wait for a coroutine of the client. Outputs that arrive meanwhile stay for `get_outputs`."""

        async def read() -> None:
            while True:
                self._kept += await self.client.get_outputs()

        async def run() -> T:
            reading = asyncio.create_task(read())
            try:
                async with asyncio.timeout(timeout_s):
                    return await work()
            except TimeoutError:
                raise EngineDeadError(f"no answer within {timeout_s:g} s") from None
            finally:
                reading.cancel()
                await asyncio.wait([reading])

        return self._loop.run(run)

    def in_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Call what touches the client."""
        return self._loop.call(function, *args)

    def close(self) -> None:
        self._loop.close(self.client.close)


def make_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> BlockingClient:
    """As make_async_client."""
    return _start(lambda: make_async_client(config, on_phase))


def attach_client(
    daemon: Attachment,
    client_kind: str,
    weight: float = 1.0,
    timeout_s: float = ATTACH_TIMEOUT_S,
    on_phase: PhaseCallback | None = None,
) -> BlockingClient:
    """As attach_async_client."""

    async def attach() -> AsyncMPClient:
        client = AsyncMPClient(find_daemon_engines(daemon), client_kind=client_kind, weight=weight)
        await client.wait_until_ready(timeout_s, on_phase)
        return client

    return _start(attach)


def _start(make_client: Callable[[], Coroutine[Any, Any, AsyncMPClient]]) -> BlockingClient:
    loop = LoopThread()
    try:
        return BlockingClient(loop, loop.run(make_client))
    except BaseException:
        loop.close(lambda: None)
        raise
