"""A part in this process: `python -m quire.tools.gpu NAME` writes what it finds to stdout, a row a line."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from .rows import Row, Say

# By name: the module and its function, loaded only for that part.
PARTS = {
    "environment": ("correctness", "check_environment"),
    "first answer": ("correctness", "check_first_answer"),
    "kernel tests": ("kernel_tests", "check_kernel_tests"),
    "memcheck": ("kernel_tests", "check_memory"),
    "golden": ("correctness", "check_golden"),
    "crowds": ("correctness", "check_crowds"),
    "graphs": ("correctness", "check_graphs"),
    "profile": ("profiler", "profile_steps"),
    "attention sweep": ("sweep", "sweep_attention"),
    "kernels": ("kernels", "bench_kernels"),
    "flashinfer": ("flashinfer", "check_flashinfer"),
    "small engine": ("engine", "bench_small_engine"),
    "large engine": ("engine", "bench_large_engine"),
    "contest": ("contest", "run_contest"),
    "faults": ("faults", "check_faults"),
    "ranks": ("ranks", "check_ranks"),
}


def run_part(name: str, say: Say) -> None:
    """Run a part; each loads only what it needs."""
    if name not in PARTS:
        raise SystemExit(f"part={name!r}: no such part")
    module, function = PARTS[name]
    getattr(import_module(f".{module}", __package__), function)(say)


def _claim_stdout() -> Say:
    """What libraries print goes to stderr from now on."""
    rows = os.dup(1)
    os.dup2(2, 1)

    def say(row: Row) -> None:
        os.write(rows, row.to_line().encode())

    return say


if __name__ == "__main__":
    run_part(sys.argv[1], _claim_stdout())
