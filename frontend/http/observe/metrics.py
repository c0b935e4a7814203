"""/metrics: the engine's counts in Prometheus' text format, with the names that vLLM's users know.

The engine counts, not this process: any of N HTTP processes over one engine gives the same `quire:` series
(`--metrics-prefix` names them otherwise), which `frontend/observe/series.py` makes of its counts.
Of several models each has series of its own, told apart by model_name, and of several engines that share a
model's requests each, told apart by engine. A model that does not answer has none but `quire:engine_up`. Only
the `process_` and `python_` series are of the process that answers; `http_` series, and those of stored and
background responses, are of all HTTP processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from ....ipc.errors import QuireError
from ....ipc.protocol.engine_views import DEFAULT_METRICS_PREFIX
from ...observe.series import EnginesCollector, EnginesMetrics
from ..bodies.openapi import Routes
from ..engines.served_models import ServedModel, ServedModels
from ..jobs.store import ENDS, EVICTED, RUNNING, STORED, STORED_BYTES
from .http_counts import BOUNDS_S, STATUSES, HttpCounts, RouteCounts
from .server_info import ANSWER_S

T = TypeVar("T")
_REST = 19  # times what a round has computed until the next: a twentieth of this process's time


class Rounds(Generic[T]):
    """A text that is dear to write and the same for everybody: who asks while one is being written, or soon
    after, waits for the next, which is newer than all that it answers.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], write: Callable[[T], bytes]) -> None:
        """`write` computes, of what `ask` waits for."""
        self._ask, self._write = ask, write
        self._next: asyncio.Task[bytes] | None = None  # that has not begun
        self._turn = asyncio.Lock()
        self._due_at = 0.0  # monotonic

    async def find(self) -> bytes:
        """The text. Raises what `ask` does."""
        if self._next is None:
            self._next = asyncio.create_task(self._run())
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _run(self) -> bytes:
        async with self._turn:
            if (wait_s := self._due_at - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            self._next = None
            answer, began = await self._ask(), time.thread_time()
            text = self._write(answer)
            self._due_at = time.monotonic() + _REST * (time.thread_time() - began)
            return text


def add_routes(routes: Routes, models: ServedModels, find_counts: Callable[[], HttpCounts]) -> None:
    """Serve /metrics. The only engine, when it is gone, raises EngineDeadError, for the app to answer."""
    prefix = models.parts.options.metrics_prefix
    process_registry = CollectorRegistry()
    ProcessCollector(registry=process_registry)
    PlatformCollector(registry=process_registry)
    GCCollector(registry=process_registry)

    async def ask() -> dict[str, EnginesMetrics | None]:
        if models.has_several:
            metrics = await asyncio.gather(*map(_ask, models.models))
        else:
            metrics = [await models.only.llm.metrics_by_engine()]
        return dict(zip([model.name for model in models.models], metrics, strict=True))

    def write(metrics: dict[str, EnginesMetrics | None]) -> bytes:
        body = format_metrics(metrics, prefix)
        counts = find_counts()
        body += format_http_counts(counts.read()) + format_response_counts(counts.read_more(), prefix)
        return body + generate_latest(process_registry)

    rounds = Rounds(ask, write)

    async def show_metrics() -> Response:
        return Response(await rounds.find(), headers={"content-type": CONTENT_TYPE_LATEST})

    routes.add("/metrics", show_metrics, "Prometheus metrics", "text/plain")


async def _ask(model: ServedModel) -> EnginesMetrics | None:
    """What the engines of a model beside others have counted; None while none answers."""
    if not model.is_here or model.serving.llm.is_recovering:
        return None
    try:
        async with asyncio.timeout(ANSWER_S):
            return await model.serving.llm.metrics_by_engine()
    except (QuireError, TimeoutError):
        return None


def format_metrics(
    metrics: Mapping[str, EnginesMetrics | None], prefix: str = DEFAULT_METRICS_PREFIX
) -> bytes:
    """The series of each model's engines in the text format; None: of a model that does not answer."""
    return generate_latest(EnginesCollector(metrics, prefix))


def format_http_counts(counts: Sequence[RouteCounts]) -> bytes:
    """Requests by route, with the names of prometheus_fastapi_instrumentator, which vLLM uses."""
    names = ["method", "handler"]
    total = CounterMetricFamily("http_requests", "HTTP requests answered.", labels=[*names, "status"])
    text = "From an HTTP request's head to the end of its answer."
    times = HistogramMetricFamily("http_request_duration_seconds", text, labels=names)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    for route in counts:
        for status, value in zip(STATUSES, route.by_status, strict=True):
            if value:
                total.add_metric([route.method, route.path, status], value)
        buckets = list(zip(bounds, accumulate(route.buckets), strict=True))
        times.add_metric([route.method, route.path], buckets, route.sum_s)
    return generate_latest(_Families([total, times]))


def format_response_counts(numbers: Sequence[int], prefix: str = DEFAULT_METRICS_PREFIX) -> bytes:
    """Stored and background responses. numbers: as ResponseCounts has them, summed over processes."""
    metrics: list[Metric] = [
        GaugeMetricFamily(prefix + name, text, value=numbers[place])
        for place, name, text in (
            (STORED, "stored_responses", "Responses that are kept, those included that run."),
            (STORED_BYTES, "stored_response_bytes", "What they take, of each process's max_stored_bytes."),
            (RUNNING, "background_responses_running", "Responses that run in the background."),
        )
    ]
    text = "Responses that were forgotten before their time, for want of room."
    metrics.append(CounterMetricFamily(f"{prefix}stored_responses_evicted", text, value=numbers[EVICTED]))
    text = "Responses that have run in the background, by how they ended."
    ended = CounterMetricFamily(f"{prefix}background_responses", text, labels=["status"])
    for place, status in enumerate(ENDS, EVICTED + 1):
        ended.add_metric([status], numbers[place])
    return generate_latest(_Families([*metrics, ended]))


class _Families(Collector):
    """Metrics that have been made, to be written."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
