"""A profile as a file in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.protocol.engine_views import StepTrace, TracedStep

DEFAULT_FOLDER = "quire_profile"
_CORE, _WORKER = 1, 2  # threads of an engine's process in the viewer
_US = 1e6
_Event = dict[str, Any]


def write_trace(traces: Mapping[int, StepTrace], folder: str | Path = DEFAULT_FOLDER) -> Path:
    """Write a profile of engines, by their numbers, to a new file in `folder`, which is made if need be."""
    path = Path(folder) / f"quire-{time.time_ns()}.trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(format_trace(traces))
    return path


def format_trace(traces: Mapping[int, StepTrace]) -> bytes:
    """The file's bytes. Its times begin at the first step."""
    start = min((trace.steps[0].schedule_at for trace in traces.values() if trace.steps), default=0.0)
    events = [event for index, trace in traces.items() for event in _describe_engine(index, trace, start)]
    dropped = {
        f"steps beyond the limit, engine {index}": trace.num_dropped for index, trace in traces.items()
    }
    return msgspec.json.encode(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"started_at": start, **dropped}}
    )


def read_profile_folder(profiler_config: Any) -> str:
    """Where vLLM's profiler_config has traces go. Raises ConfigError."""
    if profiler_config is None:
        return DEFAULT_FOLDER
    known = {"profiler", "torch_profiler_dir"}
    if not isinstance(profiler_config, Mapping):
        raise ConfigError("profiler_config", profiler_config, "a dict with 'torch_profiler_dir', or None")
    config = cast(Mapping[str, Any], profiler_config)
    if unknown := config.keys() - known:
        raise ConfigError("profiler_config", min(unknown), "only 'profiler' and 'torch_profiler_dir'")
    if config.get("profiler") not in (None, "torch"):
        raise ConfigError("profiler", config["profiler"], "'torch', which means Quire's own here")
    folder = config.get("torch_profiler_dir") or DEFAULT_FOLDER
    if not isinstance(folder, (str, os.PathLike)):
        raise ConfigError("torch_profiler_dir", folder, "a folder's name")
    return os.fspath(cast(str | os.PathLike[str], folder))


def _describe_engine(index: int, trace: StepTrace, start: float) -> Iterator[_Event]:
    yield {"ph": "M", "name": "process_name", "pid": index, "args": {"name": f"engine {index}"}}
    for thread, name in ((_CORE, "engine core"), (_WORKER, "worker")):
        yield {"ph": "M", "name": "thread_name", "pid": index, "tid": thread, "args": {"name": name}}
    answered_at = 0.0
    for step in trace.steps:
        # A step that was submitted while another one ran began when that one was answered.
        yield from _describe_step(index, step, start, max(step.submitted_at, answered_at))
        answered_at = step.answered_at


def _describe_step(index: int, step: TracedStep, start: float, began: float) -> Iterator[_Event]:
    counts = {"step": step.step_id, "tokens": step.num_tokens, "rows": step.num_rows}
    sizes = {"running": step.num_running, "waiting": step.num_waiting}
    for thread, name, since, until, args in (
        (_CORE, "schedule", step.schedule_at, step.submitted_at, counts),
        (_WORKER, "step", began, step.answered_at, counts | {"sampled": step.num_sampled}),
        (_CORE, "update", step.answered_at, step.updated_at, counts),
    ):
        times = {"ts": (since - start) * _US, "dur": max(0.0, until - since) * _US}
        yield {"ph": "X", "name": name, "pid": index, "tid": thread, **times, "args": args}
    for name, args in (("requests", sizes), ("tokens of a step", {"tokens": step.num_tokens})):
        yield {"ph": "C", "name": name, "pid": index, "ts": (step.schedule_at - start) * _US, "args": args}
