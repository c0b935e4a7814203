"""Is attention fast on this GPU? Rows of `quire bench kernels`, judged by measured ceilings."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...ipc.processes.process import module_command
from .rows import Row, Say, judge

# Shape -> what is counted, the ceiling, and the least part of that. "8b": 32 heads with 8 of keys, else 16.
_COPY, _MATRICES = ("num_bytes", "copy_bytes_per_s", 0.85), ("num_flops", "bf16_flops_per_s", 0.50)
JUDGED = {"decode 64 x 4096": _COPY, "8b decode 64 x 4096": _COPY, "8b prefill 8192": _MATRICES}


def bench_kernels(say: Say, device: str = "cuda") -> None:
    """Attention, rotation and the write to the cache, each as a fraction of what the device allows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = module_command("quire", "bench", "kernels", "--device", device)
        command += ["--op", "attention", "rotate", "--json", str(path)]
        subprocess.run(command, stdout=sys.stderr, check=True)
        report = json.loads(path.read_text())
    for row in judge_report(report):
        say(row)


def judge_report(report: dict[str, Any], judged: Mapping[str, tuple[str, str, float]] = JUDGED) -> list[Row]:
    """A row for each of the bench's; a shape that is to be judged and is not there has failed."""
    ceilings = report["ceilings"]
    rows: list[Row] = []
    shapes: set[str] = set()
    for row in report["rows"]:
        shape, us = f"{row['op']} {row['shape']}", f"{row['seconds'] * 1e6:,.1f} us"
        counted, ceiling, least = judged.get(row["shape"], (*_COPY[:2], None))
        rate = row[counted] / row["seconds"]
        if least is None:
            rows.append(Row(shape, f"{us}, {rate / 1e9:,.0f} GB/s"))
        else:
            shapes.add(row["shape"])
            rows.append(judge(shape, rate / ceilings[ceiling], least, f"of {ceiling}, {us}"))
    return rows + [Row(shape, "not measured", "done", False) for shape in judged if shape not in shapes]
