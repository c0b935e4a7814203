"""An engine's series as vLLM's classes."""

from __future__ import annotations

from typing import Any

from quire.frontend.observe.metric_values import Counter, Gauge, Histogram, Metric, read_metrics
from quire.frontend.observe.series import EnginesCollector
from quire.ipc.protocol.engine_views import EngineMetrics, SchedulerStats
from quire.ipc.protocol.engine_views import Histogram as Counts

NONE: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__, 0) | {"stall": None}


def look(prefix: str = "quire:", **stats: Any) -> list[Metric]:
    times = Counts(bounds=(0.5, 1.0), counts=[2, 3, 1], sum=7.5)
    metrics = EngineMetrics(
        stats=SchedulerStats(**(NONE | stats)),
        histograms={"time_to_first_token_seconds": times},
        finished_total={"stop": 7, "length": 2},
    )
    return read_metrics(EnginesCollector({"m": {0: metrics, 3: metrics}}, prefix).collect())


def test_each_series_is_a_value_of_its_kind_with_its_labels():
    found = look(num_running=3, generation_tokens_total=800, schedule_s_total=0.5, row_work_s_total=0.25)
    labels = {"model_name": "m", "engine": "3"}
    assert Gauge("quire:num_requests_running", labels, 3) in found
    assert Counter("quire:generation_tokens", labels, 800) in found
    assert Counter("quire:request_success", labels | {"finished_reason": "length"}, 2) in found
    assert Counter("quire:step_loop_seconds", labels | {"part": "schedule"}, 0.5) in found
    assert Counter("quire:row_work_seconds", labels, 0.25) in found
    buckets = {"0.5": 2, "1.0": 5, "+Inf": 6}
    assert Histogram("quire:time_to_first_token_seconds", labels, 6, 7.5, buckets) in found
