"""A cold start as one process: `python -m quire.tools.bench.first_token SPAWNED_AT MODEL IDLE_S`.

Starts an engine, generates one token, then stays idle for IDLE_S seconds under watch. Prints one JSON object.
SPAWNED_AT is the parent's `time.monotonic()` just before it started this process (one clock for all processes
on Linux), so that the interpreter's own start counts too.
"""

from __future__ import annotations

import sys
import time
from typing import Any

ENTERED_AT = time.monotonic()  # before the imports that are to be measured

import msgspec  # noqa: E402
import psutil  # noqa: E402

from ...frontend.llm import LLM  # noqa: E402
from ...ipc.params.sampling_params import SamplingParams  # noqa: E402


def measure_cold_start(spawned_at: float, model: str, idle_s: float) -> dict[str, Any]:
    """startup's ColdStart: start, generate one token, watch; ends the engine before it returns."""
    imported_at = time.monotonic()
    with LLM(model=model, log_level="WARNING") as llm:
        ready_at = time.monotonic()
        llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        first_token_at = time.monotonic()
        engine = llm.llm_engine.startup
        pids = llm.llm_engine.facts.pids
        processes = {"frontend": psutil.Process()} | {role: psutil.Process(pid) for role, pid in pids.items()}
        rss_bytes = {role: process.memory_info().rss for role, process in processes.items()}
        before, start = _sum_cpu_s(processes), time.monotonic()
        time.sleep(idle_s)
        idle_share = (_sum_cpu_s(processes) - before) / (time.monotonic() - start) if idle_s > 0 else None
    phases = [
        ("interpreter", ENTERED_AT - spawned_at),
        ("import the frontend", imported_at - ENTERED_AT),
        (
            "check arguments, load the tokenizer",
            ready_at - imported_at - sum(seconds for _, seconds in engine),
        ),
        *engine,
        ("first token", first_token_at - ready_at),
    ]
    return {"phases": phases, "rss_bytes": rss_bytes, "idle_cpu_share": idle_share}


def _sum_cpu_s(processes: dict[str, psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes.values()]
    return sum(t.user + t.system for t in times)


if __name__ == "__main__":
    report = measure_cold_start(float(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
