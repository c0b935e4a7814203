"""/metrics: what Prometheus' own parser reads from it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire.frontend.http.observe.metrics import format_metrics
from quire.ipc.protocol.engine_views import EngineMetrics, Histogram, SchedulerStats

LABELS = {"model_name": 'a "model"', "engine": "0"}


def make_metrics(kv_blocks_total: int = 80) -> EngineMetrics:
    stats = SchedulerStats(
        num_running=3,
        num_waiting=4,
        num_clients=2,
        kv_blocks_used=20,
        kv_blocks_total=kv_blocks_total,
        prefix_cache_queries_total=100,
        prefix_cache_hits_total=25,
        prefix_misses_evicted_total=48,
        num_preemptions_total=5,
        num_steps_total=6,
        prompt_tokens_total=700,
        generation_tokens_total=800,
        schedule_s_total=0.5,
        update_s_total=0.25,
        step_wait_s_total=2.0,
    )
    histograms = {
        "time_to_first_token_seconds": Histogram(bounds=(0.5, 1.0), counts=[2, 3, 1], sum=7.5),
        "iteration_tokens_total": Histogram(bounds=(1, 8), counts=[0, 9, 0], sum=45.0),
    }
    return EngineMetrics(
        stats=stats,
        histograms=histograms,
        finished_total={"stop": 7, "error": 0},
        finished_by_kind_total={"plain": 4, "grammar": 3},
        tool_parse_errors_total=9,
        reasoning_tokens_total=120,
    )


def read(metrics: EngineMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(series, labels without the common ones) -> value; the common ones must be on each."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(
        format_metrics({LABELS["model_name"]: {0: metrics}}).decode()
    ):
        assert family.documentation, family.name
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items()
            found[sample.name, frozenset(sample.labels.items() - LABELS.items())] = sample.value
    return found


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("num_requests_running", {}, 3),
        ("num_requests_waiting", {}, 4),
        ("num_clients", {}, 2),
        ("kv_blocks", {}, 80),
        ("kv_cache_usage_perc", {}, 0.25),
        ("tool_parse_errors_total", {}, 9),
        ("reasoning_tokens_total", {}, 120),
        ("prefix_cache_queries_total", {}, 100),
        ("prefix_cache_hits_total", {}, 25),
        ("num_preemptions_total", {}, 5),
        ("prompt_tokens_total", {}, 700),
        ("generation_tokens_total", {}, 800),
        ("engine_steps_total", {}, 6),
        # Ends also of the kinds that never came.
        ("request_success_total", {"finished_reason": "stop"}, 7),
        ("request_success_total", {"finished_reason": "error"}, 0),
        ("requests_by_kind_total", {"kind": "grammar"}, 3),
        ("prefix_cache_misses_total", {"reason": "no_such_prefix"}, 0),
        ("prefix_cache_misses_total", {"reason": "evicted"}, 48),
        ("step_loop_seconds_total", {"part": "schedule"}, 0.5),
        ("step_loop_seconds_total", {"part": "update"}, 0.25),
        ("step_loop_seconds_total", {"part": "wait"}, 2.0),
        # A histogram is cumulative and ends with everything.
        ("time_to_first_token_seconds_bucket", {"le": "0.5"}, 2),
        ("time_to_first_token_seconds_bucket", {"le": "1.0"}, 5),
        ("time_to_first_token_seconds_bucket", {"le": "+Inf"}, 6),
        ("time_to_first_token_seconds_sum", {}, 7.5),
        ("time_to_first_token_seconds_count", {}, 6),
        ("iteration_tokens_total_sum", {}, 45.0),
    ],
)
def test_series_have_vllms_names(name: str, labels: dict[str, str], value: float) -> None:
    assert read(make_metrics())[f"quire:{name}", frozenset(labels.items())] == value


def test_an_engine_without_blocks_uses_none() -> None:
    assert read(make_metrics(kv_blocks_total=0))["quire:kv_cache_usage_perc", frozenset()] == 0


def test_each_engine_of_a_model_has_series_of_its_own_and_a_name_stands_once() -> None:
    text = format_metrics({"a": {0: make_metrics(), 3: make_metrics(kv_blocks_total=90)}}).decode()
    assert text.count("# TYPE quire:kv_blocks gauge") == 1
    assert 'quire:kv_blocks{engine="0",model_name="a"} 80.0' in text
    assert 'quire:kv_blocks{engine="3",model_name="a"} 90.0' in text


def test_series_have_another_prefix_where_dashboards_want_one() -> None:
    text = format_metrics({"a": {0: make_metrics()}, "away": None}, "vllm:").decode()
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert {"vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket", "vllm:engine_up"} <= names
    assert all(name.startswith("vllm:") for name in names)
