"""Profiles become files that trace viewers open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.observe.trace_file import DEFAULT_FOLDER, format_trace, read_profile_folder, write_trace
from quire.ipc.errors import ConfigError
from quire.ipc.protocol.engine_views import StepTrace, TracedStep

# Step 2 was submitted at 10.25, while step 1 ran until 11.
STEPS = [
    TracedStep(1, 10.0, 10.125, 11.0, 11.25, 7, 2, 1, 2, 3),
    TracedStep(2, 10.125, 10.25, 11.5, 11.75, 2, 2, 2, 2, 0),
]


def read(trace: bytes, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == phase]


def test_a_trace_shows_what_core_and_worker_did_when():
    trace = format_trace({0: StepTrace(STEPS)})
    shown = [(event["name"], event["tid"], event["ts"], event["dur"]) for event in read(trace, "X")]
    assert shown == [
        ("schedule", 1, 0, 125_000),
        ("step", 2, 125_000, 875_000),
        ("update", 1, 1_000_000, 250_000),
        ("schedule", 1, 125_000, 125_000),
        ("step", 2, 1_000_000, 500_000),
        ("update", 1, 1_500_000, 250_000),
    ]
    assert read(trace, "X")[1]["args"] == {"step": 1, "tokens": 7, "rows": 2, "sampled": 1}
    assert read(trace, "C")[0]["args"] == {"running": 2, "waiting": 3}


def test_engines_are_processes_of_the_trace_and_have_one_beginning():
    later = [TracedStep(1, 12.0, 12.125, 13.0, 13.25, 1, 1, 1, 1, 0)]
    trace = format_trace({0: StepTrace(STEPS), 1: StepTrace(later, 5), 2: StepTrace([])})
    assert {event["pid"] for event in read(trace, "M")} == {0, 1, 2}
    assert min(event["ts"] for event in read(trace, "X") if event["pid"] == 1) == 2_000_000
    assert json.loads(trace)["otherData"]["steps beyond the limit, engine 1"] == 5


def test_each_profile_has_a_file_of_its_own(tmp_path: Path):
    paths = {write_trace({0: StepTrace(STEPS)}, tmp_path / "new") for _ in range(2)}
    assert len(paths) == 2
    assert all(json.loads(path.read_bytes())["traceEvents"] for path in paths)


def test_vllms_profiler_config_says_where_traces_go():
    assert read_profile_folder(None) == DEFAULT_FOLDER
    assert read_profile_folder({"profiler": "torch", "torch_profiler_dir": "x"}) == "x"
    for bad in ({"profiler": "cuda"}, {"torch_profiler_with_stack": True}, {"torch_profiler_dir": 3}, 4):
        with pytest.raises(ConfigError, match=r"profiler|torch_profiler_dir"):
            read_profile_folder(bad)
