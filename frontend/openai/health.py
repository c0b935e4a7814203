"""/live, /ready and /health: whether the process answers, whether requests are taken, whether they get on.

/health asks the engine, at most once at a time however many ask, and waits for it no longer than ANSWER_S.
"""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response

from ...ipc.errors import QuireError
from ...ipc.messages import SchedulerStats
from ..async_llm import AsyncLLM
from .bodies.openapi import Routes
from .bodies.schema import HealthResponse, StatusResponse
from .serving import Serving
from .stream import respond

ANSWER_S = 5.0  # beyond it an engine that has not answered is unhealthy


class EngineCheck:
    """Whether an engine's accepted requests get tokens."""

    def __init__(self, llm: AsyncLLM, stall_s: float, answer_s: float = ANSWER_S) -> None:
        """`stall_s`: how long a request may have no token while the device is free; 0: for ever."""
        self._llm = llm
        self._stall_s = stall_s
        self._answer_s = answer_s
        self._look: asyncio.Task[SchedulerStats] | None = None
        self._asked_at = 0.0

    async def find_problem(self) -> HealthResponse | None:
        """None if all is well. An engine that does not answer is a problem."""
        if self._stall_s == 0:
            return None
        if self._look is None or self._look.done():
            self._look, self._asked_at = asyncio.create_task(self._llm.stats()), time.monotonic()
        look = self._look
        await asyncio.wait({look}, timeout=self._answer_s)
        if not look.done():
            return HealthResponse("unresponsive", for_s=round(time.monotonic() - self._asked_at, 3))
        if isinstance(look.exception(), QuireError):
            return HealthResponse("unresponsive", stage=str(look.exception()))
        stall = look.result().stall
        if stall is None or stall.free_s < self._stall_s:
            return None
        return HealthResponse("stalled", stall.request_id, stall.stage, round(stall.free_s, 3))


def add_routes(routes: Routes, serving: Serving) -> None:
    """Serve the three."""
    check = EngineCheck(serving.llm, serving.options.stall_s)

    async def live() -> Response:
        return respond(StatusResponse("live"))

    async def ready() -> Response:
        status = serving.status
        return respond(StatusResponse(status), status=200 if status == "ready" else 503)

    async def health() -> Response:
        status = serving.status
        problem = await check.find_problem() if status == "ready" else HealthResponse(status)
        return respond(problem or HealthResponse("ready"), status=503 if problem else 200)

    routes.add("/live", live, "The process answers.", StatusResponse, name="live")
    text = "New requests are taken; 503 while they are not."
    routes.add("/ready", ready, text, StatusResponse, name="ready", more={503: StatusResponse})
    text = "As /ready, and those taken get on; 503 with the request that does not, and its stage."
    routes.add("/health", health, text, HealthResponse, name="health", more={503: HealthResponse})
