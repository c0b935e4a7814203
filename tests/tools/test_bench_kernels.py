"""The rows of the kernel bench: what is run is what the label says, and the floor is the larger of two."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from quire.tools.bench.ceilings import take_better
from quire.tools.bench.kernel_case import Bench, Case, time_case
from quire.tools.bench.kernel_cases import MAKERS
from quire.tools.bench.kernels import Ceilings, Options, Row, format_ceilings, format_rows

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CEILINGS = Ceilings(
    device="cpu",
    read_bytes_per_s=1e9,
    copy_bytes_per_s=2e9,
    cache_bytes_per_s=1e10,
    bf16_flops_per_s=1e12,
    f32_flops_per_s=1e11,
)


def make_row(num_bytes: int, num_flops: int, is_resident: bool = False, dtype: str = "bfloat16") -> Row:
    return Row(
        op="linear",
        shape="m 1",
        dtype=dtype,
        seconds=2e-3,
        torch_seconds=3e-3,
        num_bytes=num_bytes,
        num_flops=num_flops,
        is_resident=is_resident,
    )


@pytest.mark.parametrize(
    ("row", "floor", "share", "bound"),
    [
        (make_row(1_000_000, 1000), "1,000", "50%", "memory"),
        (make_row(1_000_000, 1000, is_resident=True), "100", "5%", "cache"),
        (make_row(1000, 10**9), "1,000", "50%", "operations"),
        (make_row(1000, 10**8, dtype="float32"), "1,000", "50%", "operations"),
    ],
)
def test_a_floor_is_the_larger_of_bytes_and_operations(row: Row, floor: str, share: str, bound: str) -> None:
    cells = format_rows([row], CEILINGS).splitlines()[2].split()
    assert cells[4:8] == ["2,000", floor, share, bound]
    assert cells[-2:] == ["3,000", "1.50x"]


def test_the_better_ceilings_count() -> None:
    other = replace(CEILINGS, read_bytes_per_s=3e9, bf16_flops_per_s=5e11)
    best = take_better(CEILINGS, other)
    assert (best.read_bytes_per_s, best.bf16_flops_per_s) == (3e9, 1e12)
    assert "3.00" in format_ceilings(best)


def test_calls_take_turns_and_torchs_are_timed_beside_them() -> None:
    made: list[str] = []
    case = Case(
        op="o",
        shape="s",
        dtype=torch.float32,
        calls=[lambda: made.append("a"), lambda: made.append("b")],
        torch_calls=[lambda: made.append("torch")],
        num_bytes=1,
    )
    times = time_case(case, CPU, seconds=0.01)
    assert {"a", "b", "torch"} == set(made)
    assert abs(made.count("a") - made.count("b")) <= 6, "a round may end between the two"
    assert all(0 < seconds < 0.01 for seconds in times)


def test_dense_cases_compute_what_torch_computes() -> None:
    torch.manual_seed(0)
    for case in islice(MAKERS["dense"](Bench(CPU, cold_bytes=1)), 8):  # the embedding's table is large
        found, expected = case.calls[0](), case.torch_calls[0]()
        for ours, theirs in zip(
            *(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


def test_the_command_knows_all_operations() -> None:
    assert tuple(MAKERS) == Options().op


@pytest.mark.slow
def test_the_command_ends_with_a_row_for_each_case(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "quire", "bench", "kernels", "--op", "rotate", "sampling"]
    command += ["--seconds", "0.01", "--device", "cpu", "--json", str(path)]
    subprocess.run(command, check=True, timeout=100, stdout=subprocess.DEVNULL)
    rows = msgspec.json.decode(path.read_bytes())["rows"]
    assert [row["op"] for row in rows] == ["rotate and write"] * 4 + ["sampling"] * 9
