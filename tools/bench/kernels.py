"""`quire bench kernels`: each operation as a fraction of what the device allows, beside torch.

First the ceilings are measured, then a row for each operation and shape, then the ceilings once more.
Torch is loaded when it is measured with.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ...ipc.processes.cgroup import count_processors
from ..options import POSITIVE, option
from .ceilings import (
    MEMORY_READ_BYTES,
    measure_copy_rate,
    measure_matrix_rate,
    measure_read_rate,
    take_better,
)
from .machine import print_machine, write_json
from .table import format_rate, format_table

if TYPE_CHECKING:
    import torch

_OPS = ("linear", "attention", "rotate", "dense", "sampling", "encoder")
_CACHE_READ_BYTES = {"cpu": 2**20, "cuda": 16 * 2**20}
_COLD_BYTES = {"cpu": MEMORY_READ_BYTES, "cuda": 512 * 2**20}  # past an L2 of 50 MB
_FIGURES = ("us", "floor us", "of floor", "bound by", "GB/s", "GFLOP/s", "torch us", "torch / ours")
_CEILINGS = (  # of Ceilings, in its order
    "read from memory, GB/s",
    "copy in memory (read and written), GB/s",
    "read from a cache, GB/s",
    "bfloat16 matrix product, GFLOP/s",
    "float32 matrix product, GFLOP/s",
)
_NOTES = (
    "best of 5 rounds that alternate with torch's; the floor is the larger of bytes and operations at the",
    "ceilings, which are the best of before and after the rows. Weights, tables and KV caches rotate through",
    "more memory than the caches hold; tiny's stay in a cache, as activations do. A few us are the call.",
    "torch's column: linear, its dense attention for a prompt, for the rest the references in kernels/",
)


@dataclass(frozen=True, slots=True)
class Options:
    """Measured ceilings first, then each operation and shape as a fraction of them."""

    op: tuple[str, ...] = option(_OPS, f"of {', '.join(_OPS)} (all)", choices=_OPS, metavar="OP")
    seconds: float = option(0.5, "for a row (0.5)", POSITIVE, metavar="S")
    device: str | None = option(None, "default: cuda if there is one", choices=("cpu", "cuda"))
    json: str | None = option(None, "write every figure to a file too", metavar="FILE")


class Ceilings(msgspec.Struct, frozen=True):
    """Measured rates of the device, each the best of some rounds."""

    device: str
    read_bytes_per_s: float  # from memory
    copy_bytes_per_s: float  # from memory to memory, both counted
    cache_bytes_per_s: float
    bf16_flops_per_s: float
    f32_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One operation in one shape. Seconds are of one call."""

    op: str
    shape: str
    dtype: str
    seconds: float
    torch_seconds: float
    num_bytes: int  # that must be moved
    num_flops: int
    is_resident: bool  # its data stay in a cache between calls


def run(options: Options) -> int:
    """Measure and print; returns 0."""
    import torch

    from .kernel_case import Bench, time_case
    from .kernel_cases import MAKERS

    machine = print_machine()
    torch.manual_seed(0)
    torch.set_num_threads(count_processors())
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    ceilings, rows = _measure_ceilings(device), list[Row]()
    bench = Bench(device, _COLD_BYTES[device.type])
    with torch.inference_mode():
        for case in (case for op in options.op for case in MAKERS[op](bench)):
            print(f"{case.op}: {case.shape}", file=sys.stderr, flush=True)
            times = time_case(case, device, options.seconds)
            dtype = str(case.dtype).removeprefix("torch.").replace("uint4", "int4")
            sizes = (case.num_bytes, case.num_flops, case.is_resident)
            rows.append(Row(case.op, case.shape, dtype, *times, *sizes))
    ceilings = take_better(ceilings, _measure_ceilings(device))
    print(format_ceilings(ceilings) + "\n")
    print(format_rows(rows, ceilings))
    write_json(options.json, {"machine": machine, "ceilings": ceilings, "rows": rows})
    return 0


def _measure_ceilings(device: torch.device) -> Ceilings:
    import torch

    kind = device.type
    return Ceilings(
        device=torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        read_bytes_per_s=measure_read_rate(kind, MEMORY_READ_BYTES),
        copy_bytes_per_s=measure_copy_rate(kind, MEMORY_READ_BYTES // 2),
        cache_bytes_per_s=measure_read_rate(kind, _CACHE_READ_BYTES[kind]),
        bf16_flops_per_s=measure_matrix_rate(kind, "bfloat16"),
        f32_flops_per_s=measure_matrix_rate(kind, "float32"),
    )


def format_ceilings(ceilings: Ceilings) -> str:
    """What the rows are fractions of."""
    _, *rates = msgspec.structs.astuple(ceilings)
    rows = [[label, format_rate(rate / 1e9)] for label, rate in zip(_CEILINGS, rates, strict=True)]
    return format_table([f"measured ceilings of {ceilings.device}", ""], rows)


def format_rows(rows: list[Row], ceilings: Ceilings) -> str:
    """The table of operations, and what its columns mean."""
    # format_table aligns the first column only to the left, so that operation, shape and type are one cell.
    widths = [max((len(row.op) for row in rows), default=0), max((len(row.shape) for row in rows), default=0)]
    cells = [
        [f"{row.op:<{widths[0]}}  {row.shape:<{widths[1]}}  {row.dtype}", *_format_figures(row, ceilings)]
        for row in rows
    ]
    return "\n".join([format_table(["operation, shape, type", *_FIGURES], cells), *_NOTES])


def _format_figures(row: Row, ceilings: Ceilings) -> list[str]:
    # Narrow weights are multiplied as bfloat16.
    flops_rate = ceilings.f32_flops_per_s if row.dtype == "float32" else ceilings.bf16_flops_per_s
    bytes_rate = ceilings.cache_bytes_per_s if row.is_resident else ceilings.read_bytes_per_s
    bytes_s, flops_s = row.num_bytes / bytes_rate, row.num_flops / flops_rate
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
