"""AsyncMPClient: the EngineCoreClient of an event loop, with engines of its own or a daemon's.

What it reads and writes by is async_pump.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Sequence

from ...ipc.errors import EngineDeadError, EngineStartError
from ...ipc.protocol.client_protocol import LOST_CALL
from ...ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineFacts,
    FinishReason,
    FrontendCounts,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.spec.config import EngineConfig
from .async_pump import AsyncPump
from .engine_connection import PhaseCallback
from .engine_core_client import EngineCoreClient
from .engine_links import GATHER_S, EngineLink, connect_links
from .engines import Engine, start_engines
from .remote_daemon import Attachment, find_daemon_engines

UTILITY_TIMEOUT_S = 30.0
ATTACH_TIMEOUT_S = 600.0  # to a daemon whose engine is starting


async def make_async_client(config: EngineConfig, on_phase: PhaseCallback | None = None) -> AsyncMPClient:
    """Start private engines and wait until they are ready. Raises ModelError, ConfigError, EngineStartError.

    An engine core is a process of its own in every case.
    """
    client = AsyncMPClient(start_engines(config))
    await client.wait_until_ready(config.ready_timeout_s, on_phase)
    return client


async def attach_async_client(
    daemon: Attachment, client_kind: str, weight: float = 1.0, on_phase: PhaseCallback | None = None
) -> AsyncMPClient:
    """Attach to a running daemon. Raises DaemonError when there is none of this name."""
    if isinstance(daemon, str):
        engines = find_daemon_engines(daemon)
    else:  # a name server may take its time
        engines = await asyncio.to_thread(find_daemon_engines, daemon)
    client = AsyncMPClient(engines, client_kind=client_kind, weight=weight)
    await client.wait_until_ready(ATTACH_TIMEOUT_S, on_phase)
    return client


class AsyncMPClient(EngineCoreClient):
    """Used from one event loop. An engine may be replaced by another: client_protocol.py says how."""

    def __init__(
        self, engines: Sequence[Engine], *, client_kind: str = "private", weight: float = 1.0
    ) -> None:
        self._links = connect_links(engines, client_kind, weight)
        self._finalizer = weakref.finalize(self, self._links.close)
        self._unsent: list[EngineCoreRequest] = []  # of this turn of the loop
        self._failed: list[EngineCoreOutput] = []  # the ends of those that could not be sent
        self._calls: dict[tuple[EngineLink, int], asyncio.Future[UtilityResult]] = {}
        self._loop = asyncio.get_running_loop()
        self._pump = AsyncPump(self._links, self._fail_calls, self._end)

    @property
    def is_connected(self) -> bool:
        """False while every engine is being restarted; requests wait and go on afterwards."""
        return self._links.are_open

    @property
    def num_engines(self) -> int:
        """Those included that are being restarted."""
        return len(self._links)

    @property
    def engines(self) -> dict[int, EngineFacts]:
        return self._links.facts

    async def wait_until_ready(self, timeout_s: float, on_phase: PhaseCallback | None = None) -> None:
        """Start-up's other half. Raises like `make_async_client`, and then has ended the engines."""
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    while not self._links.are_ready:
                        self._take(*await self._pump.receive(), on_phase)
            except TimeoutError:
                raise EngineStartError(f"the engine was not ready within {timeout_s:g} s") from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    while not self._links.are_gathered:
                        self._take(*await self._pump.receive())
        except BaseException:
            self.close()
            raise
        self._links.form_group()
        self.startup = self._links.first.engine.measure_startup(self.facts)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.check_usable()
        self._links.target.add_requests(requests, time.monotonic())
        self._pump.run_all()

    def add_requests_soon(self, requests: Sequence[EngineCoreRequest]) -> None:
        """As `add_requests`, in one message with whatever else is added in this turn of the loop.

        A message costs this process and the core about as much as a short text does. A request that cannot
        be sent ends with an error, as an output.
        """
        self.check_usable()
        if not self._unsent:
            self._loop.call_soon(self._pump.guard, self._send_unsent)
        self._unsent += requests

    def _send_unsent(self) -> None:
        if not self._unsent or self._links.have_ended:
            return
        requests, self._unsent = self._unsent, []
        try:
            self._links.target.add_requests(requests, time.monotonic())
        except Exception:  # one of them cannot be encoded
            self._send_apart(requests)
        self._pump.run_all()

    def _send_apart(self, requests: list[EngineCoreRequest]) -> None:
        """Each that is not with an engine, on its own: what cannot be sent fails alone."""
        taken = {request_id for link in self._links for request_id in link.protocol.ledger.ids}
        for request in requests:
            if request.request_id in taken:
                continue
            try:
                self._links.target.add_requests([request], time.monotonic())
            except Exception as error:
                reason, end = f"it cannot be sent to the engine: {error}", FinishReason.ERROR
                self._failed.append(
                    EngineCoreOutput(request.request_id, 0, [], finish_reason=end, error=reason)
                )
        if self._links.group is not None:
            self._links.group.take_outputs(self._failed, time.monotonic())
        self._pump.wake()

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self.check_usable()
            self._send_unsent()
            self._links.target.abort_requests(request_ids)
            self._pump.run_all()

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        self.check_usable()
        self._send_unsent()
        self._links.target.abort_named(names, tenant)
        self._pump.run_all()

    def add_counts(self, counts: FrontendCounts) -> None:
        """As AsyncLLM's."""
        self.check_usable()
        self._links.target.send(counts)
        self._pump.run_all()

    async def get_outputs(self) -> list[EngineCoreOutput]:
        try:
            while True:
                if self._failed:
                    failed, self._failed = self._failed, []
                    return failed
                if await self._pump.wait() and (outputs := self._take(*self._pump.take())):
                    return outputs
                self._resolve_calls()
        except Exception as error:
            self._end(str(error))
            raise

    async def call_utility(self, method: UtilityMethod, engine: int | None = None) -> UtilityResult:
        """Call an engine, None: any; the answer comes through the task that runs `get_outputs`.

        It is an error if the engine is lost before it answers and there are others; "any" is then another.
        """
        try:
            async with asyncio.timeout(UTILITY_TIMEOUT_S):
                while True:
                    self.check_usable()
                    result = await self._call(self._links.find(engine), method)
                    if engine is not None or result.error != LOST_CALL:
                        return result
        except TimeoutError:
            raise EngineDeadError(f"no answer to {method.name} within {UTILITY_TIMEOUT_S:g} s") from None

    async def _call(self, link: EngineLink, method: UtilityMethod) -> UtilityResult:
        call_id = link.protocol.start_call(method)
        answer = self._calls[link, call_id] = self._loop.create_future()
        try:
            self._pump.run(link)
            return await answer
        finally:
            link.protocol.end_call(call_id)
            del self._calls[link, call_id]

    def _resolve_calls(self) -> None:
        for (link, call_id), answer in self._calls.items():
            result = link.protocol.answers.get(call_id)
            if result is not None and not answer.done():
                answer.set_result(result)

    async def call_each(self, method: UtilityMethod) -> dict[int, UtilityResult]:
        indexes = list(self._links.facts)
        if len(indexes) < 2:
            return {next(iter(indexes), 0): await self.call_utility(method)}
        answers = await asyncio.gather(
            *(self.call_utility(method, index) for index in indexes), return_exceptions=True
        )
        return {index: _as_result(answer) for index, answer in zip(indexes, answers, strict=True)}

    def close(self) -> None:
        if self._finalizer.alive:
            self._pump.stop()
        with contextlib.suppress(RuntimeError):  # its loop may be closed: then nobody waits any more
            self._end("the engine was closed")
        self._finalizer()

    def check_usable(self) -> None:
        self._links.check()

    def _end(self, reason: str) -> None:
        """No output and no answer will come any more."""
        self._links.end(reason)
        self._pump.wake()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))

    def _fail_calls(self, lost: EngineLink) -> None:
        """End the calls of an engine that is lost for good while others go on."""
        self._note_facts()
        for (link, _), answer in self._calls.items():
            if link is lost and not answer.done():
                answer.set_result(UtilityResult(0, LOST_CALL))

    def _take(
        self, link: EngineLink, frames: list[bytes], on_phase: PhaseCallback | None = None
    ) -> list[EngineCoreOutput]:
        if link.is_gone:
            return []
        try:
            return self._links.take(link, frames, time.monotonic(), on_phase)
        finally:
            if link.protocol.outbox:
                self._pump.run(link)
            self._pump.settle()
            self._note_facts()

    def _note_facts(self) -> None:
        if self._links.shown_facts is not None:
            self.facts = self._links.shown_facts


def _as_result(answer: UtilityResult | BaseException) -> UtilityResult:
    if isinstance(answer, EngineDeadError):
        return UtilityResult(0, error=str(answer))
    if isinstance(answer, BaseException):
        raise answer
    return answer
