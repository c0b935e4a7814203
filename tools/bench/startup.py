"""`quire bench startup`: how long the first things take, where the time goes, and what idling costs.

Everything is measured in fresh processes; the table of a cold start adds up to its wall time. Loads no torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import msgspec

from ..options import COUNT, POSITIVE, option
from .bench_model import ensure_written
from .machine import print_machine, write_json
from .model_configs import BENCH_MODELS
from .table import format_megabytes, format_table

_QUICK_ROUNDS = 7  # of the commands that take a fraction of a second
_TIMEOUT_S = 600.0
_IMPORT_SCRIPT = "import time; t = time.perf_counter(); import quire; print(time.perf_counter() - t)"


@dataclass(frozen=True, slots=True)
class Options:
    """What starting costs, measured in fresh processes."""

    model: str = option("pocket", "of the cold start: pocket, tiny, small, or a folder")
    rounds: int = option(5, "cold starts (5)", COUNT, metavar="N")
    idle: float = option(10.0, "seconds of idling to watch (10)", POSITIVE, metavar="S")
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")


class _ColdStart(msgspec.Struct, frozen=True):
    """What first_token.py prints; `phases` add up to the time from spawning to the first token."""

    phases: list[tuple[str, float]]
    rss_bytes: dict[str, int]
    idle_cpu_share: float | None  # of one core, over all processes; None if it was not watched


def run(options: Options) -> int:
    """Measure and print; returns 0. Raises CalledProcessError when a start fails."""
    machine, model, rounds = print_machine(), options.model, options.rounds
    if model in BENCH_MODELS:
        model = str(ensure_written(model))
    quick = {
        "python -c pass (wall)": _time("-c", "pass"),
        "import quire (inside the process)": _time("-c", _IMPORT_SCRIPT),
        "quire --version (wall)": _time("-m", "quire", "--version"),
        "quire --help (wall)": _time("-m", "quire", "--help"),
    }
    rows = [[name, f"{seconds * 1e3:.0f}"] for name, seconds in quick.items()]
    print(format_table([f"medians of {_QUICK_ROUNDS}", "ms"], rows) + "\n")
    starts = [_start_cold(model, options.idle if number == rounds - 1 else 0.0) for number in range(rounds)]
    median = sorted(starts, key=_wall_s)[len(starts) // 2]
    rows = [[name, f"{seconds:.3f}"] for name, seconds in [*median.phases, ("total", _wall_s(median))]]
    title = f"cold start to first token, {model} (the median of {rounds} rounds)"
    print(format_table([title, "s"], rows))
    print(f"all rounds, s: {', '.join(f'{_wall_s(start):.2f}' for start in starts)}\n")
    last = starts[-1]
    print(format_table(["process", "RSS MB"], [[k, format_megabytes(v)] for k, v in last.rss_bytes.items()]))
    if last.idle_cpu_share is not None:
        share = f"{last.idle_cpu_share:.2%} of one core over all processes"
        print(f"\nidle: {share}, watched for {options.idle:.0f} s")
    write_json(options.json, {"machine": machine, "quick_s": quick, "cold_starts": starts})
    return 0


def _wall_s(start: _ColdStart) -> float:
    return sum(seconds for _, seconds in start.phases)


def _start_cold(model: str, idle_s: float) -> _ColdStart:
    script = f"{__package__}.first_token"
    command = [sys.executable, "-m", script, repr(time.monotonic()), model, repr(idle_s)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=_TIMEOUT_S).stdout
    return msgspec.json.decode(out.splitlines()[-1], type=_ColdStart)


def _time(*arguments: str) -> float:
    """Median wall seconds of a Python command in a fresh process, or of what it prints."""
    times: list[float] = []
    for _ in range(_QUICK_ROUNDS):
        start = time.perf_counter()
        command = [sys.executable, *arguments]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=_TIMEOUT_S).stdout
        wall_s = time.perf_counter() - start
        times.append(float(out) if _IMPORT_SCRIPT in arguments else wall_s)
    return statistics.median(times)
