"""/live, /ready and /health: whether the process answers, whether requests are taken, whether they get on.

/health asks the engine, at most once at a time however many ask, and waits for it no longer than ANSWER_S.
Of several engines /ready and /health say how each is. They are 200 as long as one is well: a probe of the
server shall not end it for an engine that is away. `?model=NAME` asks about that one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response

from ...ipc.engine_views import SchedulerStats
from ...ipc.errors import QuireError
from .bodies.openapi import Routes
from .bodies.schema import HealthResponse, StatusResponse
from .engines.served_models import WELL, ServedModel, ServedModels, sum_up
from .errors import ErrorResponse
from .stream import respond

ANSWER_S = 5.0  # beyond it an engine that has not answered is unhealthy


class EngineCheck:
    """Whether an engine's accepted requests get tokens."""

    def __init__(
        self,
        ask: Callable[[], Coroutine[Any, Any, SchedulerStats]],
        stall_s: float,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`stall_s`: how long a request may have no token while the device is free; 0: for ever."""
        self._ask = ask
        self._stall_s = stall_s
        self._answer_s = answer_s
        self._look: asyncio.Task[SchedulerStats] | None = None
        self._asked_at = 0.0

    async def find_problem(self) -> HealthResponse | None:
        """None if all is well. An engine that does not answer is a problem."""
        if self._stall_s == 0:
            return None
        if self._look is None or self._look.done():
            self._look, self._asked_at = asyncio.create_task(self._ask()), time.monotonic()
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


def add_routes(routes: Routes, models: ServedModels) -> None:
    """Serve the three."""
    stall_s = models.parts.options.stall_s
    checks = {model: EngineCheck(functools.partial(_ask, model), stall_s) for model in models.models}

    async def look(model: ServedModel) -> HealthResponse:
        status = model.status
        problem = await checks[model].find_problem() if status == "ready" else None
        return problem or HealthResponse(status, stage=model.away_because)

    async def live() -> Response:
        return respond(StatusResponse("live"))

    async def ready(model: str | None = None) -> Response:
        if model is not None:
            body = StatusResponse(models.find(model).status)
        elif models.has_several:
            body = StatusResponse(models.status, {one.name: one.status for one in models.models})
        else:
            body = StatusResponse(models.status)
        return respond(body, status=200 if body.status in WELL else 503)

    async def health(model: str | None = None) -> Response:
        if model is not None or not models.has_several:
            body = await look(models.find(model))
        else:
            found = await asyncio.gather(*map(look, models.models))
            each = {one.name: body for one, body in zip(models.models, found, strict=True)}
            body = HealthResponse(sum_up(one.status for one in found), models=each)
        return respond(body, status=200 if body.status in WELL else 503)

    routes.add("/live", live, "The process answers.", StatusResponse, name="live")
    text = "New requests are taken; 503 while they are not."
    routes.add(
        "/ready", ready, text, StatusResponse, name="ready", more={404: ErrorResponse, 503: StatusResponse}
    )
    text = "As /ready, and those taken get on; 503 with the request that does not, and its stage."
    routes.add(
        "/health", health, text, HealthResponse, name="health", more={404: ErrorResponse, 503: HealthResponse}
    )


async def _ask(model: ServedModel) -> SchedulerStats:
    return await model.serving.llm.stats()
