"""`quire bench startup`: how long the first things take, where the time goes, and what idling costs.

Everything is measured in fresh processes; the table of a cold start adds up to its wall time. Loads no torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from .contest import Contestant, Job
from .machine import describe_machine, format_machine
from .model_configs import BENCH_MODELS
from .offline import load_model_facts
from .peers import VLLM, BenchModel, check_peers, make_vllm_launch
from .table import format_megabytes, format_table
from .workloads import BenchRequest

_QUICK_ROUNDS = 7  # of the commands that take a fraction of a second
_TIMEOUT_S = 600.0
_PEER_MODEL_LEN = 512  # tokens; what a start allocates depends on it little
_IMPORT_SCRIPT = "import time; t = time.perf_counter(); import quire; print(time.perf_counter() - t)"


class _ColdStart(msgspec.Struct, frozen=True):
    """What first_token.py prints; declared again because importing it would start its clock."""

    phases: list[tuple[str, float]]
    rss_bytes: dict[str, int]
    idle_cpu_share: float | None


def run_startup(
    model: str, rounds: int, idle_s: float, json_path: str | None, peer_python: Path | None = None
) -> int:
    """Measure and print; returns 0. `peer_python`: vLLM's, to start it too.

    Raises CalledProcessError or ContestError when a start fails, InputError for an unusable peer or model.
    """
    machine = describe_machine()
    if peer_python is not None:
        versions = check_peers((VLLM,), peer_python)
        machine["peers"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if model in BENCH_MODELS:
        model = str(load_model_facts(model).folder)
    print(format_machine(machine) + "\n")
    quick = {
        "python -c pass (wall)": _time_command(["-c", "pass"]),
        "import quire (inside the process)": _time_import(),
        "quire --version (wall)": _time_command(["-m", "quire", "--version"]),
        "quire --help (wall)": _time_command(["-m", "quire", "--help"]),
    }
    rows = [[name, f"{seconds * 1e3:.0f}"] for name, seconds in quick.items()]
    print(format_table([f"medians of {_QUICK_ROUNDS}", "ms"], rows) + "\n")
    starts = [_start_cold(model, idle_s if number == rounds - 1 else 0.0) for number in range(rounds)]
    starts_by_wall = sorted(starts, key=_wall_s)
    median = starts_by_wall[len(starts) // 2]
    print(format_phases(median.phases, f"cold start to first token, {model}", rounds))
    spread = ", ".join(f"{_wall_s(start):.2f}" for start in starts)
    print(f"all rounds, s: {spread}\n")
    peer_s = None if peer_python is None else _start_vllm(model, peer_python)
    if peer_s is not None:
        print(
            f"vLLM, one round: {peer_s:.1f} s to the first token, {peer_s / _wall_s(median):.1f}x Quire's\n"
        )
    last = starts[-1]
    print(format_table(["process", "RSS MB"], [[k, format_megabytes(v)] for k, v in last.rss_bytes.items()]))
    if last.idle_cpu_share is not None:
        print(f"\nidle: {last.idle_cpu_share:.2%} of one core over all processes, watched for {idle_s:.0f} s")
    if json_path:
        report = {"machine": machine, "quick_s": quick, "cold_starts": starts, "vllm_s": peer_s}
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


def format_phases(phases: list[tuple[str, float]], title: str, rounds: int) -> str:
    """The phases of one start with their sum."""
    rows = [[name, f"{seconds:.3f}"] for name, seconds in phases]
    rows.append(["total", f"{sum(seconds for _, seconds in phases):.3f}"])
    return format_table([f"{title} (the median of {rounds} rounds)", "s"], rows)


def _wall_s(start: _ColdStart) -> float:
    return sum(seconds for _, seconds in start.phases)


def _start_cold(model: str, idle_s: float) -> _ColdStart:
    script = f"{__package__}.first_token"
    command = [sys.executable, "-m", script, repr(time.monotonic()), model, repr(idle_s)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=_TIMEOUT_S).stdout
    return msgspec.json.decode(out.splitlines()[-1], type=_ColdStart)


def _start_vllm(model: str, peer_python: Path) -> float:
    """Seconds from the start of its process to the first token, with the settings of `bench offline`."""
    launch = make_vllm_launch(BenchModel(load_model_facts(model).folder, _PEER_MODEL_LEN), peer_python)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as logs:
        start = time.perf_counter()
        peer = Contestant(VLLM, launch.command, f"{logs}/{VLLM}.log", launch.environment)
        try:
            peer.wait_until_ready()
            ready_s = time.perf_counter() - start
            return ready_s + peer.run(Job(requests=[BenchRequest([17, 18, 19, 20], 1)])).seconds
        finally:
            peer.close()


def _time_command(arguments: list[str]) -> float:
    """Median wall seconds of a Python command in a fresh process."""
    times: list[float] = []
    for _ in range(_QUICK_ROUNDS):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=_TIMEOUT_S
        )
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _time_import() -> float:
    times: list[float] = []
    for _ in range(_QUICK_ROUNDS):
        command = [sys.executable, "-c", _IMPORT_SCRIPT]
        times.append(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout))
    return statistics.median(times)
