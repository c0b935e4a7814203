"""/health: well while requests get tokens; else 503 with the request, its stage and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from frontend_fakes import make_stats
from msgspec.structs import replace
from openai_fakes import AsgiClient, FakeLLM, OpenApps
from quire.frontend.http.observe.server_info import EngineCheck
from quire.frontend.http.options import ServerOptions
from quire.ipc.errors import RequestFailedError
from quire.ipc.protocol.engine_views import SchedulerStats, StalledRequest

STALLED = make_stats(stall=StalledRequest("chatcmpl-1-0", "queued", 12.5))


class Engine:
    """Answers looks with `stats`, once `gate` is open."""

    def __init__(self, stats: SchedulerStats | Exception) -> None:
        self.answer = stats
        self.num_looks = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def stats(self) -> SchedulerStats:
        self.num_looks += 1
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def make_check(engine: Engine, **times: Any) -> EngineCheck:
    return EngineCheck(engine.stats, **times)


@pytest.mark.app(options=ServerOptions(stall_s=12.0))
async def test_a_stalled_request_fails_health_and_nothing_else(llm: FakeLLM, client: AsgiClient) -> None:
    assert STALLED.stall is not None
    llm.answered_stats = replace(STALLED, stall=replace(STALLED.stall, owner="/local"))
    answer = await client.get("/health")
    assert answer.status == 503
    assert answer.json == {
        "status": "stalled",
        "request_id": "chatcmpl-1-0",
        "stage": "queued",
        "for_s": 12.5,
    }
    assert [(await client.get(path)).status for path in ("/live", "/ready")] == [200, 200]


@pytest.mark.parametrize("stall_s", [0.0, 13.0])
async def test_within_stall_s_a_server_is_healthy(stall_s: float, open_app: OpenApps) -> None:
    app = open_app(options=ServerOptions(stall_s=stall_s))
    app.llm.answered_stats = STALLED
    answer = await app.client.get("/health")
    assert (answer.status, answer.json) == (200, {"status": "ready"})


async def test_an_engine_that_does_not_answer_is_asked_once_however_many_ask() -> None:
    engine = Engine(make_stats())
    engine.gate.clear()
    check = make_check(engine, stall_s=1.0, answer_s=0.01)
    problems = await asyncio.gather(*(check.find_problem("".__eq__) for _ in range(100)))
    assert {problem.status for problem in problems if problem is not None} == {"unresponsive"}
    assert len(problems) == 100
    assert engine.num_looks == 1
    engine.gate.set()
    assert await make_check(engine, stall_s=1.0).find_problem("".__eq__) is None


async def test_an_engine_that_fails_to_answer_is_unhealthy_with_its_words() -> None:
    problem = await make_check(Engine(RequestFailedError("no answer")), stall_s=1.0).find_problem("".__eq__)
    assert problem is not None
    assert (problem.status, problem.stage) == ("unresponsive", "no answer")
