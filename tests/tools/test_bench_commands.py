"""The kinds of `quire bench` that start something small and print a table."""

from __future__ import annotations

import asyncio

import pytest
from quire.tools.bench.cli import run as run_bench
from quire.tools.bench.core import measure_step_cost
from quire.tools.bench.http import measure_chunk_cost
from quire.tools.bench.rows import measure_row_us

pytestmark = pytest.mark.slow


def test_embed_shows_a_row_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_bench(["embed", "--model", "tiny-encoder", "--dtype", "float32", "--rounds", "1"]) == 0
    row = capfd.readouterr().out.splitlines()[-1].split()
    assert row[:2] == ["tiny-encoder,", "float32"]
    assert float(row[2].replace(",", "")) > 0
    assert int(row[3].removesuffix("%")) > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_of_every_stream_is_counted_and_has_a_cost(path: str) -> None:
    cost = asyncio.run(measure_chunk_cost(path, num_streams=8, num_chunks=1000))
    assert cost.chunks_per_s > 100
    assert cost.server_us > 0  # the kernel counts in 10 ms, so the run must be longer
    assert 20 < cost.rss_mb < 200


@pytest.mark.parametrize(("num_queued", "newcomer_every"), [(0, None), (500, None), (0, 5)])
def test_a_step_of_the_core_has_a_cost_for_each_of_its_parts(
    num_queued: int, newcomer_every: int | None
) -> None:
    cost = measure_step_cost(10, num_queued, 16, "fcfs" if newcomer_every is None else "fair", newcomer_every)
    assert 0 < cost.schedule_ms < cost.total_ms <= cost.p99_ms
    assert 0 < cost.update_ms < cost.total_ms


def test_a_row_has_a_cost_for_what_its_request_asks() -> None:
    for asks in ({"logprobs": 5, "repetition_penalty": 1.2}, {"words": [[3], [4, 5]]}):
        assert measure_row_us(asks, 300, 3, 2) > 0


def test_startup_adds_its_phases_up_and_watches_what_idles(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_bench(["startup", "--rounds", "1", "--idle", "0.5"]) == 0
    out = capfd.readouterr().out
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("cold start")) + 2
    phases = [float(line.split()[-1]) for line in lines[start : lines.index("", start) - 1]]
    assert sum(phases[:-1]) == pytest.approx(phases[-1], abs=0.02)  # each is rounded
    assert "engine-core" in out or "core" in out
    assert "idle: " in out
