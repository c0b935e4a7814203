"""An engine's counts as Prometheus' series, with the names that vLLM's users know: for /metrics and
LLM.get_metrics. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...ipc.protocol.engine_views import EngineMetrics, Histogram

EnginesMetrics = Mapping[int, EngineMetrics]  # of one model, by the number of the engine: vLLM's label

_HELP = {
    "cache_config_info": "How the KV cache was made, as labels; the value is 1.",
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait to run.",
    "num_clients": "Frontends attached to the engine.",
    "kv_cache_usage_perc": "KV blocks in use; 1 is all of them.",
    "kv_blocks": "KV blocks that there are.",
    "state_slots": "Slots for recurrent states: of running requests, cached for prefix hits, and free.",
    "request_held_bytes": "What the engine core holds for live requests.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Requests sent back to the queue.",
    "prompt_tokens": "Prompt tokens computed; cached ones are not.",
    "generation_tokens": "Tokens generated.",
    "engine_steps": "Steps scheduled.",
    "prefix_cache_misses": "Tokens of whole blocks that were looked up in the prefix cache and not found.",
    "request_success": "Requests that have ended.",
    "requests_by_kind": "Requests that have ended, by what outputs were found with; a search by beams once.",
    "tool_parse_errors": "Calls of tools that could not be read, and stayed in the answer's text.",
    "reasoning_tokens": "Generated tokens of thoughts.",
    "row_work_seconds": "The worker's time for single rows: grammars, processors of logits, logprobs.",
    "step_loop_seconds": "The step loop's time: deciding, taking results, waiting for the worker.",
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


class EnginesCollector(Collector):
    """One look's answer, in which a name stands once with the series of all engines.

    engines: of each model by name, its engines by their number; None: of one that does not answer.
    """

    def __init__(self, engines: Mapping[str, EnginesMetrics | None], prefix: str) -> None:
        self._found = engines
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
        metrics, stats = self._metrics, self._metrics.stats
        yield self._tell_cache_config()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield self._fill(GaugeMetricFamily, "num_requests_running", stats.num_running)
        yield self._fill(GaugeMetricFamily, "num_requests_waiting", stats.num_waiting)
        yield self._fill(GaugeMetricFamily, "num_clients", stats.num_clients)
        yield self._fill(GaugeMetricFamily, "kv_cache_usage_perc", used)
        yield self._fill(GaugeMetricFamily, "kv_blocks", stats.kv_blocks_total)
        slots = {"used": stats.state_slots_used, "cached": stats.state_slots_cached}
        slots["free"] = stats.state_slots_total - sum(slots.values())
        yield self._fill_each("state_slots", "state", slots, GaugeMetricFamily)
        yield self._fill(GaugeMetricFamily, "request_held_bytes", stats.held_bytes)
        yield self._fill(CounterMetricFamily, "prefix_cache_queries", stats.prefix_cache_queries_total)
        yield self._fill(CounterMetricFamily, "prefix_cache_hits", stats.prefix_cache_hits_total)
        yield self._fill(CounterMetricFamily, "num_preemptions", stats.num_preemptions_total)
        yield self._fill(CounterMetricFamily, "prompt_tokens", stats.prompt_tokens_total)
        yield self._fill(CounterMetricFamily, "generation_tokens", stats.generation_tokens_total)
        yield self._fill(CounterMetricFamily, "engine_steps", stats.num_steps_total)
        misses = {
            "no_such_prefix": stats.prefix_misses_unknown_total,
            "evicted": stats.prefix_misses_evicted_total,
            "other_salt": stats.prefix_misses_other_salt_total,
            "no_state": stats.prefix_misses_no_state_total,
        }
        yield self._fill_each("prefix_cache_misses", "reason", misses)
        yield self._fill_each("request_success", "finished_reason", metrics.finished_total)
        yield self._fill_each("requests_by_kind", "kind", metrics.finished_by_kind_total)
        yield self._fill(CounterMetricFamily, "tool_parse_errors", metrics.tool_parse_errors_total)
        yield self._fill(CounterMetricFamily, "reasoning_tokens", metrics.reasoning_tokens_total)
        yield self._fill(CounterMetricFamily, "row_work_seconds", stats.row_work_s_total)
        times = {
            "schedule": stats.schedule_s_total,
            "update": stats.update_s_total,
            "wait": stats.step_wait_s_total,
        }
        yield self._fill_each("step_loop_seconds", "part", times)
        for name, histogram in metrics.histograms.items():
            yield self._histogram(name, histogram)

    def _tell_cache_config(self) -> Metric:
        config, name = self._metrics.cache_config, "cache_config_info"
        family = GaugeMetricFamily(self._prefix + name, _HELP[name], labels=[*self._labels, *config])
        family.add_metric([*self._labels.values(), *config.values()], 1)
        return family

    def _fill(self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, value: float) -> Metric:
        family = kind(self._prefix + name, _HELP[name], labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _fill_each(
        self,
        name: str,
        label: str,
        values: Mapping[str, float],
        kind: type[GaugeMetricFamily | CounterMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        """A series for each value of `label`."""
        family = kind(self._prefix + name, _HELP[name], labels=[*self._labels, label])
        for part, value in values.items():
            family.add_metric([*self._labels.values(), part], value)
        return family

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        # As prometheus_client writes bounds in its own histograms: 1.0, not 1.
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        text = _HELP.get(name, name)
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(self._labels))
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family
