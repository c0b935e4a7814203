"""InprocClient: core, worker and torch in this process, for debuggers and profilers of all its threads."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

from ...ipc.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    UtilityCall,
    UtilityMethod,
    UtilityResult,
)
from ...ipc.spec.config import EngineConfig
from .engine_connection import PhaseCallback
from .engine_core_client import EngineCoreClient


class InprocClient(EngineCoreClient):
    """Runs steps in its event loop, one after the other while there are requests."""

    def __init__(self, config: EngineConfig, on_phase: PhaseCallback | None = None) -> None:
        """Load the model and be ready; raises what the worker's start raises."""
        started_at = time.time()
        # By name, so that a frontend process that does not ask for this mode never loads core or torch.
        engine = importlib.import_module("...core.engine.inproc_engine", __package__)
        self._engine: Any = engine.InprocEngine(config, on_phase)
        self._live: set[str] = set()
        self._has_work = asyncio.Event()
        self._call_ids = itertools.count(1)
        self.facts = self._engine.facts
        self.startup = [*self.facts.startup, ("handshake", 0.0)]
        self.startup.insert(0, ("import core", self.facts.started_at - started_at))

    def check_usable(self) -> None:
        self._engine.check_usable()

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._engine.add_request(request)
            self._live.add(request.request_id)
        self._has_work.set()

    def abort_requests(self, request_ids: list[str]) -> None:
        self._engine.abort_requests(request_ids)

    def abort_named(self, names: Sequence[str], tenant: str) -> None:
        self._engine.abort_requests([], names, tenant)

    async def get_outputs(self) -> list[EngineCoreOutput]:
        while True:
            await asyncio.sleep(0)  # other calls come between steps
            if outputs := self._engine.run_step():
                self._live -= {output.request_id for output in outputs if output.finish_reason is not None}
                return outputs
            if not self._live:
                self._has_work.clear()
                await self._has_work.wait()

    async def call_each(self, method: UtilityMethod) -> dict[int, UtilityResult]:
        return {0: self._engine.call_utility(UtilityCall(next(self._call_ids), method))}

    def close(self) -> None:
        self._engine.close()
        self._has_work.set()
