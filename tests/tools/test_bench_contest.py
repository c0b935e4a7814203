"""A contestant that cannot start, fails a job or dies is told by name with its last words."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest
from quire.tools.bench.contest import ChildReport, Contestant, ContestError, Engine, Job, JobResult, serve
from quire.tools.bench.workloads import Workload


class CountingEngine(Engine):
    """Answers at once with the workload's own counts; fails W2."""

    is_closed = False

    def run(self, workload: Workload) -> JobResult:
        if workload.name == "W2":
            raise MemoryError("too large")
        return JobResult(
            seconds=1.0, num_requests=len(workload.requests), num_output_tokens=workload.num_output_tokens
        )

    def measure_rss(self) -> dict[str, int]:
        return {"process": 1000}

    def close(self) -> None:
        self.is_closed = True


def test_jobs_are_answered_in_order_and_a_failed_one_does_not_end_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [
        Job(workload="W1", contents="a"),
        Job(workload="W2", contents="a"),
        Job(workload="W4", contents="a", num_requests=8, max_output_tokens=3),
    ]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("".join(msgspec.json.encode(j).decode() + "\n" for j in jobs))
    )
    read_end, write_end = os.pipe()
    engine = CountingEngine()
    serve(engine, vocab_size=2048, started_at=0.0, reports=write_end)
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
    contestant = Contestant("nobody", "quire.tools.bench.no_such_engine", [], str(tmp_path / "log"))
    try:
        with pytest.raises(ContestError, match=r"nobody: ended with code 1: .*No module named"):
            contestant.wait_until_ready()
    finally:
        contestant.close()
