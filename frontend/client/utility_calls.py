"""Calls about an engine rather than a request, of LLMEngine and AsyncLLM: what it counts, holds, forgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...ipc.errors import RequestFailedError
from ...ipc.messages import (
    EngineMetrics,
    EngineSnapshot,
    FrontendCounts,
    SchedulerStats,
    UtilityMethod,
    UtilityResult,
)

if TYPE_CHECKING:
    from .async_engine_core_client import AsyncMPClient


class UtilityCalls(ABC):
    """The blocking calls. All raise EngineDeadError, and RequestFailedError without an answer in time."""

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompt beginnings; False while requests hold them."""
        return self._call(UtilityMethod.RESET_PREFIX_CACHE).error is None

    def stats(self) -> SchedulerStats:
        """A look at the engine at this moment."""
        return _expect(self._call(UtilityMethod.STATS), "stats")

    def snapshot(self) -> EngineSnapshot:
        """What live views show: requests, blocks, clients, and rates over the last seconds."""
        return _expect(self._call(UtilityMethod.SNAPSHOT), "snapshot")

    def metrics(self) -> EngineMetrics:
        """What the engine has counted since it started, over all its clients."""
        return _expect(self._call(UtilityMethod.METRICS), "metrics")

    def check_integrity(self) -> str | None:
        """What is wrong with the engine's block accounting, None if nothing is."""
        return self._call(UtilityMethod.CHECK_INTEGRITY).error

    @abstractmethod
    def _call(self, method: UtilityMethod) -> UtilityResult: ...


class AsyncUtilityCalls(ABC):
    """The same for asyncio, and what is told an engine without an answer."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prompt beginnings; False while requests hold them."""
        return (await self._call(UtilityMethod.RESET_PREFIX_CACHE)).error is None

    async def stats(self) -> SchedulerStats:
        """A look at the engine at this moment."""
        return _expect(await self._call(UtilityMethod.STATS), "stats")

    async def snapshot(self) -> EngineSnapshot:
        """What live views show: requests, blocks, clients, and rates over the last seconds."""
        return _expect(await self._call(UtilityMethod.SNAPSHOT), "snapshot")

    async def metrics(self) -> EngineMetrics:
        """What the engine has counted since it started, over all its clients."""
        return _expect(await self._call(UtilityMethod.METRICS), "metrics")

    def abort_named(self, names: Sequence[str], tenant: str = "") -> None:
        """End requests of any client of the engine that came with one of these names; '': of every tenant.

        Those that it does not find it ignores. While the engine is being restarted nothing happens.
        """
        self._running_client().abort_named(names, tenant)

    def add_counts(self, counts: FrontendCounts) -> None:
        """Have the engine's `metrics` count what was found here; nothing while it is being restarted."""
        self._running_client().add_counts(counts)

    async def _call(self, method: UtilityMethod) -> UtilityResult:
        return await self._running_client().call_utility(method)

    @abstractmethod
    def _running_client(self) -> AsyncMPClient: ...


def _expect(result: UtilityResult, field: str) -> Any:
    answer = getattr(result, field)
    if answer is None:
        raise RequestFailedError(result.error or f"the engine gave no {field}")
    return answer
