"""`quire bench kernels`: each operation as a fraction of what the device allows, beside torch.

First the ceilings are measured, then a row for each operation and shape. The kernels run in a process of
their own, since this one loads no torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .kernel_rows import Ceilings, KernelReport, KernelRequest, KernelRow
from .machine import describe_machine, format_machine
from .table import format_rate, format_table

_FIGURES = ("us", "floor us", "of floor", "bound by", "GB/s", "GFLOP/s", "torch us", "torch / ours")
_NOTES = (
    "best of 5 rounds that alternate with torch's; the floor is the larger of bytes and operations at the",
    "ceilings, which are the best of before and after the rows. Weights, tables and KV caches rotate through",
    "more memory than the caches hold; tiny's stay in a cache, as activations do. A few us are the call.",
    "torch's column: linear, its dense attention for a prompt, for the rest the references in kernels/",
)


def run_kernels(ops: tuple[str, ...], seconds: float, device: str | None, json_path: str | None) -> int:
    """Measure and print; returns 0. Raises CalledProcessError when the child fails."""
    machine = describe_machine()
    print(format_machine(machine) + "\n")
    ceilings: Ceilings | None = None
    rows: list[KernelRow] = []
    for report in _run_child(KernelRequest(ops=list(ops), seconds=seconds, device=device)):
        if report.ceilings is not None:
            ceilings = report.ceilings if ceilings is None else ceilings.take_better(report.ceilings)
        if report.row is not None:
            rows.append(report.row)
            print(f"{report.row.op}: {report.row.shape}", file=sys.stderr, flush=True)
    assert ceilings is not None, "the child measures them first"
    print(format_ceilings(ceilings) + "\n")
    print(format_rows(rows, ceilings))
    if json_path:
        figures = {"machine": machine, "ceilings": ceilings, "rows": rows}
        Path(json_path).write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    return 0


def _run_child(request: KernelRequest) -> Iterator[KernelReport]:
    text = msgspec.json.encode(request).decode()
    command = [sys.executable, "-m", f"{__package__}.kernel_child", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                yield msgspec.json.decode(line, type=KernelReport)
        finally:
            if child.poll() is None and sys.exc_info()[0] is not None:
                child.kill()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)


def format_ceilings(ceilings: Ceilings) -> str:
    """What the rows are fractions of."""
    rows = [
        ["read from memory, GB/s", format_rate(ceilings.read_bytes_per_s / 1e9)],
        ["copy in memory (read and written), GB/s", format_rate(ceilings.copy_bytes_per_s / 1e9)],
        ["read from a cache, GB/s", format_rate(ceilings.cache_bytes_per_s / 1e9)],
        ["bfloat16 matrix product, GFLOP/s", format_rate(ceilings.bf16_flops_per_s / 1e9)],
        ["float32 matrix product, GFLOP/s", format_rate(ceilings.f32_flops_per_s / 1e9)],
    ]
    return format_table([f"measured ceilings of {ceilings.device}", ""], rows)


def format_rows(rows: list[KernelRow], ceilings: Ceilings) -> str:
    """The table of operations, and what its columns mean."""
    # format_table aligns the first column only to the left, so that operation, shape and type are one cell.
    widths = [max((len(row.op) for row in rows), default=0), max((len(row.shape) for row in rows), default=0)]
    cells = [
        [f"{row.op:<{widths[0]}}  {row.shape:<{widths[1]}}  {row.dtype}", *_format_figures(row, ceilings)]
        for row in rows
    ]
    return "\n".join([format_table(["operation, shape, type", *_FIGURES], cells), *_NOTES])


def _format_figures(row: KernelRow, ceilings: Ceilings) -> list[str]:
    bytes_s, flops_s = row.bytes_floor_s(ceilings), row.flops_floor_s(ceilings)
    return [
        _format_us(row.seconds),
        _format_us(max(bytes_s, flops_s)),
        f"{max(bytes_s, flops_s) / row.seconds:.0%}",
        "operations" if flops_s > bytes_s else "cache" if row.is_resident else "memory",
        format_rate(row.num_bytes / row.seconds / 1e9),
        format_rate(row.num_flops / row.seconds / 1e9) if row.num_flops else "-",
        _format_us(row.torch_seconds),
        f"{row.torch_seconds / row.seconds:.2f}x",
    ]


def _format_us(seconds: float) -> str:
    microseconds = seconds * 1e6
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"
