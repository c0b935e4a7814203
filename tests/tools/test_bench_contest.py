"""A contestant that cannot start, fails a job or dies is told by name with its last words."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import msgspec
import pytest
from quire.tools.bench.contest import ChildReport, Contestant, ContestError, Engine, Job, JobResult, serve
from quire.tools.bench.workloads import BenchRequest


class CountingEngine(Engine):
    """Answers at once with the job's own counts; fails one of two requests."""

    is_closed = False

    def run(self, job: Job) -> JobResult:
        if len(job.requests) == 2:
            raise MemoryError("too large")
        return JobResult(seconds=1.0, num_requests=len(job.requests), num_output_tokens=job.num_output_tokens)

    def measure_rss(self) -> dict[str, int]:
        return {"process": 1000}

    def close(self) -> None:
        self.is_closed = True


def test_jobs_are_answered_in_order_and_a_failed_one_does_not_end_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [
        Job(requests=[BenchRequest([1, 2], 128)]),
        Job(requests=[BenchRequest([1], 1)] * 2),
        Job(requests=[BenchRequest([3], 3)] * 8),
    ]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("".join(msgspec.json.encode(j).decode() + "\n" for j in jobs))
    )
    read_end, write_end = os.pipe()
    engine = CountingEngine()
    serve(engine, started_at=0.0, reports=write_end)
    os.close(write_end)
    with os.fdopen(read_end) as reports:
        ready, first, failed, last = (msgspec.json.decode(line, type=ChildReport) for line in reports)
    assert ready.ready_s is not None
    assert ready.rss_bytes == {"process": 1000}
    assert first.result == JobResult(seconds=1.0, num_requests=1, num_output_tokens=128)
    assert (failed.result, failed.error) == (None, "MemoryError: too large")
    assert last.result == JobResult(seconds=1.0, num_requests=8, num_output_tokens=24)
    assert engine.is_closed


def test_a_child_that_dies_is_told_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    contestant = Contestant(
        "nobody", [sys.executable, "-m", "quire.tools.bench.no_such_engine"], str(tmp_path / "log")
    )
    try:
        with pytest.raises(ContestError, match=r"nobody: ended with code 1: .*No module named"):
            contestant.wait_until_ready()
    finally:
        contestant.close()
