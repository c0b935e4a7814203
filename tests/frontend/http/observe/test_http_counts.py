"""HTTP requests by route, counted by one process or by several together."""

from __future__ import annotations

import os

from prometheus_client.parser import text_string_to_metric_families
from quire.frontend.http.jobs.store import EVICTED, RUNNING, STORED, STORED_BYTES, ResponseCounts
from quire.frontend.http.observe.http_counts import OTHER, HttpCounts, make_counts_memory
from quire.frontend.http.observe.metrics import format_http_counts

ROUTES = [("POST", "/v1/completions"), ("GET", "/v1/models/{model:path}"), ("GET", "/health")]


def test_requests_are_counted_by_route_status_and_time() -> None:
    counts = HttpCounts(ROUTES)
    for status, took_s in ((200, 0.05), (201, 0.1), (404, 2.0), (503, 99.0)):
        counts.note("POST", "/v1/completions", status, took_s)
    counts.note("GET", "/no/such/path", 404, 0.0)
    other, ours = sorted(counts.read(), key=lambda one: one.path == "/v1/completions")
    assert (ours.by_status, ours.buckets) == ([0, 2, 0, 1, 1], [2, 0, 0, 1, 0, 1])
    assert abs(ours.sum_s - 101.15) < 1e-6
    assert (other.method, other.path, other.by_status) == (OTHER, OTHER, [0, 0, 0, 1, 0])


def test_processes_of_a_group_tell_the_same_sums_also_after_one_is_lost() -> None:
    fd = make_counts_memory(3)
    processes = [HttpCounts(ROUTES, fd, place) for place in range(3)]
    for place, process in enumerate(processes):
        for _ in range(place + 1):
            process.note("GET", "/health", 200, 0.25)
    again = HttpCounts(reversed(ROUTES), fd, 1)  # in the place of a lost one
    again.note("GET", "/health", 200, 0.25)
    os.close(fd)
    for process in (*processes, again):
        (health,) = process.read()
        assert health.by_status == [0, 7, 0, 0, 0]
        assert health.sum_s == 1.75


def test_others_count_beside_the_routes_and_a_new_process_begins_with_its_own_gauges() -> None:
    fd = make_counts_memory(2)
    counts, responses = (
        [HttpCounts(ROUTES, fd, place) for place in range(2)],
        [ResponseCounts() for _ in range(2)],
    )
    for one, of_responses in zip(counts, responses, strict=True):
        of_responses.write_to(one.more)
        of_responses.note_stored(2, 100)
        of_responses.begin_background()
        of_responses.note_evicted()
    again = HttpCounts(ROUTES, fd, 1)  # in the place of a lost one
    ResponseCounts().write_to(again.more)
    os.close(fd)
    told = again.read_more()
    assert told == counts[0].read_more()
    assert [told[place] for place in (STORED, STORED_BYTES, RUNNING, EVICTED)] == [2, 100, 1, 2]
    assert again.read() == []


def test_the_series_have_the_names_that_dashboards_ask_for() -> None:
    counts = HttpCounts(ROUTES)
    counts.note("POST", "/v1/completions", 200, 0.3)
    text = format_http_counts(counts.read()).decode()
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = (("handler", "/v1/completions"), ("method", "POST"))
    assert found["http_requests_total", *labels, ("status", "2xx")] == 1
    assert found["http_request_duration_seconds_bucket", labels[0], ("le", "0.5"), labels[1]] == 1
    assert found["http_request_duration_seconds_bucket", labels[0], ("le", "0.1"), labels[1]] == 0
    assert found["http_request_duration_seconds_count", *labels] == 1
