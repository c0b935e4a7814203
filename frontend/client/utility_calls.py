"""Calls about an engine rather than a request, of LLMEngine and AsyncLLM: what it counts, holds, forgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ...ipc.errors import RequestFailedError
from ...ipc.messages import EngineMetrics, EngineSnapshot, SchedulerStats, UtilityMethod, UtilityResult


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
    """The same for asyncio."""

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

    @abstractmethod
    async def _call(self, method: UtilityMethod) -> UtilityResult: ...


def _expect(result: UtilityResult, field: str) -> Any:
    answer = getattr(result, field)
    if answer is None:
        raise RequestFailedError(result.error or f"the engine gave no {field}")
    return answer
