"""`python -m quire.tools.gpu_check`, or tools/gpu_check: one command for a machine with a GPU.

Environment, a first answer, kernel tests compiled and under memcheck, golden runs, crowds, graphs on and off;
a profile, kernels and engines beside the cost model, FlashInfer; faults brought about, ranks on two GPUs;
ending in a table. Every part is a process of its own with a deadline: one that crashes or hangs costs its own
rows. Rows are said, and written to --out, as they come. A part that lacks a module or the time has failed;
--wheels FOLDER installs what a machine without a network lacks, from wheels, into a folder of this run. One
that lacks GPUs is skipped, and said to be. Other engines beside ours are `quire bench offline`'s.
Exit codes: 0 all that was judged is right, 1 something is not, 2 no GPU or wrong usage.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from .bench.machine import find_commit
from .bench.table import format_table
from .gpu.rows import Row, append_line, read_row


class Part(NamedTuple):
    """A function of a module of `gpu/`, loaded only for that part, and the most seconds that it may take.

    Those are three times what it should: kernels are compiled the first time. All parts together have
    --total-s, of which each gets at most what is left.
    """

    module: str
    function: str
    most_s: float


PARTS = {  # in order
    "environment": Part("correctness", "check_environment", 60.0),
    "first answer": Part("correctness", "check_first_answer", 120.0),
    "kernel tests": Part("kernel_tests", "check_kernel_tests", 240.0),
    "memcheck": Part("kernel_tests", "check_memory", 240.0),
    "golden": Part("correctness", "check_golden", 120.0),
    "crowds": Part("correctness", "check_crowds", 420.0),
    "graphs": Part("correctness", "check_graphs", 120.0),
    "profile": Part("profiler", "profile_steps", 180.0),
    "kernels": Part("kernels", "bench_kernels", 300.0),
    "flashinfer": Part("flashinfer", "check_flashinfer", 240.0),
    "small engine": Part("engine", "bench_small_engine", 240.0),
    "large engine": Part("engine", "bench_large_engine", 135.0),
    "faults": Part("faults", "check_faults", 210.0),
    "ranks": Part("faults", "check_ranks", 120.0),
}
_PART = (sys.executable, "-m", "quire.tools.gpu")  # and its name
_TOTAL_S = 1750.0  # a machine is lent for half an hour
_NO_GPU = 2
_INSTALL_S = 300.0
_NO_MODULE = "ModuleNotFoundError: No module named "


def main(argv: list[str] | None = None) -> int:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check", description="Checks and measures Quire on a GPU."
    )
    parser.add_argument(
        "--part", action="append", choices=list(PARTS), help="only this part; may be repeated"
    )
    parser.add_argument(
        "--total-s", type=float, default=_TOTAL_S, metavar="S", help=f"for all parts ({_TOTAL_S:.0f})"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="add each row to FILE as it comes")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install the wheels there for this run")
    options = parser.parse_args(argv)
    if options.wheels is not None:
        _install_wheels(options.wheels)
    missing = _find_missing_gpu()
    if missing is not None:
        print(f"tools/gpu_check: {missing}", file=sys.stderr)
        return _NO_GPU
    started = time.monotonic()
    findings: dict[str, list[Row]] = {}
    if options.out is not None:
        command = shlex.join(["tools/gpu_check", *(sys.argv[1:] if argv is None else argv)])
        for row in (Row("date", _now()), Row("commit", find_commit() or "unknown"), Row("command", command)):
            append_line(options.out, "run", row)
    for name in options.part or PARTS:
        left_s = options.total_s - (time.monotonic() - started)
        print(f"gpu_check: {name} ...", file=sys.stderr, flush=True)
        findings[name] = _run_part(name, min(PARTS[name].most_s, left_s), options.out)
    _report(findings, time.monotonic() - started)
    return int(any(row.is_ok is False for rows in findings.values() for row in rows))


def _find_missing_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch finds no GPU here; the kernels' tests run in Triton's interpreter: pytest tests/kernels"
    return None


def _install_wheels(folder: Path) -> None:
    """Into a folder that this run's processes find first; what they need beside is not looked for."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"tools/gpu_check: --wheels {folder}: a folder with wheels (*.whl)")
    site = tempfile.mkdtemp(prefix="quire-gpu-check-")
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site]
    done = subprocess.run([*command, *wheels], stdout=sys.stderr, timeout=_INSTALL_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"tools/gpu_check: pip could not install the wheels in {folder}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, site)


def _run_part(name: str, timeout_s: float, out: Path | None = None) -> list[Row]:
    """The part's rows, and one more if it failed or was cut off; said, and added to `out`, as they come."""
    if timeout_s <= 0:
        return [Row(name, "not run: no time is left", "done", False)]
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        print(f"  {row.name}: {row.value}", file=sys.stderr, flush=True)
        if out is not None:
            append_line(out, name, row)

    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen([*_PART, name], stdout=subprocess.PIPE, stderr=errors, text=True) as part:
            timer = threading.Timer(timeout_s, part.kill)
            timer.start()
            assert part.stdout is not None
            for row in filter(None, map(read_row, part.stdout)):
                tell(row)
        timer.cancel()
        seconds = time.monotonic() - start
        errors.seek(0)
        last = _explain_end(name, part.returncode, errors.read())
        if seconds >= timeout_s:
            last = Row(name, f"not done in {timeout_s:.0f} s", "done", False)
        if last is not None:
            tell(last)
    return [*rows, Row(f"{name}, seconds", f"{seconds:.0f}")]


def _explain_end(name: str, code: int, stderr: str) -> Row | None:
    if code == 0:
        return None
    lines = stderr.strip().splitlines() or [""]
    if lines[-1].startswith(_NO_MODULE):
        module = lines[-1].removeprefix(_NO_MODULE)
        return Row(name, f"not run: no module {module}; --wheels FOLDER installs wheels", "done", False)
    sys.stderr.write(stderr[-4000:])
    return Row(name, f"ended with code {code}: {lines[-1][:200]}", "code 0", False)


def _report(findings: dict[str, list[Row]], seconds: float) -> None:
    marks = {True: "ok", False: "NO", None: ""}
    rows = [[row.name, row.value, row.wanted, marks[row.is_ok]] for part in findings.values() for row in part]
    print(format_table(["check", "found", "wanted", ""], rows))
    print(f"\n{_now()}, {seconds:.0f} s")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


if __name__ == "__main__":
    sys.exit(main())
