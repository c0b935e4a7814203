"""/metrics: what Prometheus' own parser reads from it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire.frontend.http.observe.metrics import Rounds, format_metrics
from quire.ipc.errors import EngineDeadError
from quire.ipc.protocol.engine_views import EngineMetrics, Histogram, SchedulerStats

GOLDEN = Path(__file__).parents[3] / "golden" / "metrics.txt"


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


def test_series_have_vllms_names_kinds_and_texts() -> None:
    """QUIRE_WRITE_GOLDEN=1 has the golden file written anew, for a reviewer."""
    text = format_metrics({'a "model"': {0: make_metrics()}})
    if os.environ.get("QUIRE_WRITE_GOLDEN"):
        GOLDEN.write_bytes(text)
    assert text.decode() == GOLDEN.read_text()
    assert all(family.documentation for family in text_string_to_metric_families(text.decode()))


def test_an_engine_without_blocks_uses_none() -> None:
    text = format_metrics({"a": {0: make_metrics(kv_blocks_total=0)}}).decode()
    assert 'quire:kv_cache_usage_perc{engine="0",model_name="a"} 0.0' in text


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


async def test_however_many_ask_a_text_is_written_in_rounds_each_newer_than_who_it_answers() -> None:
    num_asked, num_written, may_answer = 0, 0, asyncio.Event()

    async def ask() -> int:
        nonlocal num_asked
        num_asked += 1
        number = num_asked
        await may_answer.wait()
        return number

    def write(number: int) -> bytes:
        nonlocal num_written
        num_written += 1
        return str(number).encode()

    rounds = Rounds(ask, write)
    first = [asyncio.create_task(rounds.find()) for _ in range(100)]
    while not num_asked:
        await asyncio.sleep(0)
    late = [asyncio.create_task(rounds.find()) for _ in range(100)]  # the first answer may be older than they
    await asyncio.sleep(0)
    first[0].cancel()
    may_answer.set()
    assert set(await asyncio.gather(*first[1:])) == {b"1"}
    assert set(await asyncio.gather(*late)) == {b"2"}
    assert num_written == 2


async def test_who_waits_for_a_round_is_told_why_it_fails_and_the_next_goes_well() -> None:
    fails = True

    async def ask() -> bytes:
        if fails:
            raise EngineDeadError("gone")
        return b"well"

    rounds = Rounds(ask, bytes)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await rounds.find()
    fails = False
    assert await rounds.find() == b"well"
