"""/metrics: the engine's counts in Prometheus' text format, with the names that vLLM's users know.

The engine counts, not this process: any of N HTTP processes over one engine gives the same `quire:` series
(`--metrics-prefix` names them otherwise).
Of several models each has series of its own, told apart by model_name, and of several engines that share a
model's requests each, told apart by engine. A model that does not answer has none but `quire:engine_up`. Only
the `process_` and `python_` series are of the process that answers; `http_` series are of all HTTP processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

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

from ...ipc.engine_views import EngineMetrics, Histogram
from ...ipc.errors import QuireError
from .access.http_counts import BOUNDS_S, STATUSES, RouteCounts
from .bodies.openapi import Routes
from .engines.served_models import ServedModel, ServedModels
from .health import ANSWER_S
from .options import DEFAULT_METRICS_PREFIX

PREFIX = DEFAULT_METRICS_PREFIX

EnginesMetrics = Mapping[int, EngineMetrics]  # of one model, by the number of the engine: vLLM's label

_HELP_OF_HISTOGRAM = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "e2e_request_latency_seconds": "From a request's arrival to its last token.",
    "request_queue_time_seconds": "From entering the engine to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
    "request_max_num_generation_tokens": "Generated tokens of a request's sequence.",
    "request_params_max_tokens": "Tokens that a request might generate.",
    "request_params_n": "Sequences that a request asked for.",
    "iteration_tokens_total": "Tokens computed in a step.",
}


def add_routes(
    routes: Routes, models: ServedModels, read_counts: Callable[[], Sequence[RouteCounts]]
) -> None:
    """Serve /metrics. The only engine, when it is gone, raises EngineDeadError, for the app to answer."""
    prefix = models.parts.options.metrics_prefix
    own = CollectorRegistry()
    ProcessCollector(registry=own)
    PlatformCollector(registry=own)
    GCCollector(registry=own)

    async def show_metrics() -> Response:
        if models.has_several:
            found = await asyncio.gather(*map(_ask, models.models))
        else:
            found = [await models.only.llm.metrics_by_engine()]
        names = [model.name for model in models.models]
        body = format_metrics(dict(zip(names, found, strict=True)), prefix)
        body += format_http_counts(read_counts()) + generate_latest(own)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

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


def format_metrics(found: Mapping[str, EnginesMetrics | None], prefix: str = PREFIX) -> bytes:
    """The series of each model's engines in the text format; None: of a model that does not answer."""
    return _format(_EnginesCollector(found, prefix))


def format_http_counts(counts: Sequence[RouteCounts]) -> bytes:
    """Requests by route, with the names of prometheus_fastapi_instrumentator, which vLLM uses."""
    return _format(_HttpCollector(counts))


def _format(collector: Collector) -> bytes:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


class _HttpCollector(Collector):
    """What the HTTP processes have counted together."""

    def __init__(self, counts: Sequence[RouteCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        names = ["method", "handler"]
        total = CounterMetricFamily("http_requests", "HTTP requests answered.", labels=[*names, "status"])
        text = "From an HTTP request's head to the end of its answer."
        times = HistogramMetricFamily("http_request_duration_seconds", text, labels=names)
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        for route in self._counts:
            for status, value in zip(STATUSES, route.by_status, strict=True):
                if value:
                    total.add_metric([route.method, route.path, status], value)
            buckets = list(zip(bounds, accumulate(route.buckets), strict=True))
            times.add_metric([route.method, route.path], buckets, route.sum_s)
        return (total, times)


class _EnginesCollector(Collector):
    """One scrape's answer, in which a name stands once with the series of all engines."""

    def __init__(self, found: Mapping[str, EnginesMetrics | None], prefix: str) -> None:
        self._found = found
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, engines in self._found.items():
            for index, metrics in (engines or {}).items():
                for family in _EngineCollector(metrics, name, str(index), self._prefix).collect():
                    families.setdefault(family.name, family)
                    if families[family.name] is not family:
                        families[family.name].samples += family.samples
        if len(self._found) > 1:
            text = "Whether the engine answers, of a server with several."
            up = families["engine_up"] = GaugeMetricFamily(
                f"{self._prefix}engine_up", text, labels=["model_name", "engine"]
            )
            for name, engines in self._found.items():
                for index in engines or (0,):
                    up.add_metric([name, str(index)], engines is not None)
        return families.values()


class _EngineCollector(Collector):
    """What one engine has counted."""

    def __init__(self, metrics: EngineMetrics, model_name: str, engine: str, prefix: str) -> None:
        self._prefix = prefix
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": engine}

    def collect(self) -> Iterable[Metric]:
        yield self._tell_cache_config()
        stats = self._metrics.stats
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
            ("num_clients", "Frontends attached to the engine.", stats.num_clients),
            ("kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", used),
            ("kv_blocks", "KV blocks that there are.", stats.kv_blocks_total),
            ("request_held_bytes", "What the engine core holds for live requests.", stats.held_bytes),
        ):
            yield self._fill(GaugeMetricFamily, name, text, {"": value})
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                stats.prefix_cache_queries_total,
            ),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits_total),
            ("num_preemptions", "Requests sent back to the queue.", stats.num_preemptions_total),
            ("prompt_tokens", "Prompt tokens computed; cached ones are not.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("engine_steps", "Steps scheduled.", stats.num_steps_total),
        ):
            yield self._fill(CounterMetricFamily, name, text, {"": value})
        misses = {
            "no_such_prefix": stats.prefix_misses_unknown_total,
            "evicted": stats.prefix_misses_evicted_total,
            "other_salt": stats.prefix_misses_other_salt_total,
        }
        text = "Tokens of whole blocks that were looked up in the prefix cache and not found."
        yield self._fill(CounterMetricFamily, "prefix_cache_misses", text, misses, "reason")
        ends = self._metrics.finished_total
        yield self._fill(
            CounterMetricFamily, "request_success", "Requests that have ended.", ends, "finished_reason"
        )
        text = "Requests that have ended, by what their outputs were found with."
        kinds = self._metrics.finished_by_kind_total
        yield self._fill(CounterMetricFamily, "requests_by_kind", text, kinds, "kind")
        for name, text, value in (
            (
                "tool_parse_errors",
                "Calls of tools that could not be read, and stayed in the answer's text.",
                self._metrics.tool_parse_errors_total,
            ),
            ("reasoning_tokens", "Generated tokens of thoughts.", self._metrics.reasoning_tokens_total),
        ):
            yield self._fill(CounterMetricFamily, name, text, {"": value})
        times = {
            "schedule": stats.schedule_s_total,
            "update": stats.update_s_total,
            "wait": stats.step_wait_s_total,
        }
        text = "The step loop's time: deciding, taking results, waiting for the worker."
        yield self._fill(CounterMetricFamily, "step_loop_seconds", text, times, "part")
        for name, histogram in self._metrics.histograms.items():
            yield self._histogram(name, histogram)

    def _tell_cache_config(self) -> Metric:
        config = self._metrics.cache_config
        text = "How the KV cache was made, as labels; the value is 1."
        family = GaugeMetricFamily(f"{self._prefix}cache_config_info", text, labels=[*self._labels, *config])
        family.add_metric([*self._labels.values(), *config.values()], 1)
        return family

    def _fill(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str | None = None,
    ) -> Metric:
        """A family with a series for each value of `label`, or one without it."""
        family = kind(self._prefix + name, text, labels=[*self._labels, *([label] if label else ())])
        for part, value in values.items():
            family.add_metric([*self._labels.values(), *([part] if label else ())], value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        # As prometheus_client writes bounds in its own histograms: 1.0, not 1.
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        text = _HELP_OF_HISTOGRAM.get(name, name)
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(self._labels))
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family
