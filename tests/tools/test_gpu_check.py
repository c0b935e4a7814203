"""tools/gpu_check without a GPU: what it refuses and how it reports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from quire.tools import gpu_check
from quire.tools.bench.cost_model import CARDS, StepWork
from quire.tools.gpu.kernels import judge_report
from quire.tools.gpu.rows import Row, judge, read_row
from quire.tools.gpu.targets import find_known_card, judge_step

ROOT = Path(__file__).parents[2]


def fake_part(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Every part is this script; sys.argv[1] names the part."""
    monkeypatch.setattr(gpu_check, "_find_missing_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "_PART", (sys.executable, "-c", script))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    command = [str(ROOT / "tools" / "gpu_check")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert "torch finds no GPU here" in done.stderr
    assert done.stdout == ""


SAY = (
    "import sys\nfrom quire.tools.gpu.rows import Row\n"
    "say = lambda row: print(row.to_line(), end='', flush=True)\n"
)


def test_a_part_without_its_modules_has_failed_and_says_how_to_bring_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_part(monkeypatch, "import a_module_that_nobody_has")
    assert gpu_check.main(["--part", "golden"]) == 1
    said = capsys.readouterr().out
    assert "not run: no module 'a_module_that_nobody_has'; --wheels FOLDER" in said


def check_parts(tmp_path: Path, *names: str) -> list[tuple[str, ...]]:
    """Runs a check that fails; (part, row, what it found) as they are written while it runs."""
    out = tmp_path / "rows.jsonl"
    parts = [word for name in names for word in ("--part", name)]
    assert gpu_check.main([*parts, "--out", str(out)]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows[:3]] == ["date", "commit", "command"]
    return [(row["part"], row["name"], row["value"]) for row in rows[3:]]


def test_a_part_that_fails_keeps_its_rows_and_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_part(monkeypatch, SAY + "say(Row('first', '7', '7', True)); raise RuntimeError('illegal address')")
    end = "ended with code 1: RuntimeError: illegal address"
    assert check_parts(tmp_path, "golden", "graphs") == [
        ("golden", "first", "7"),
        ("golden", "golden", end),
        ("graphs", "first", "7"),
        ("graphs", "graphs", end),
    ]
    said, shown = capsys.readouterr()
    assert "  first: 7" in shown
    names = [line.split()[0] for line in said.splitlines()[2:8]]
    assert names == ["first", "golden", "golden,", "first", "graphs", "graphs,"]


def test_a_part_for_which_no_time_is_left_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_find_missing_gpu", lambda: None)
    assert gpu_check.main(["--part", "golden", "--total-s", "0"]) == 1
    assert "not run: no time is left" in capsys.readouterr().out


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a folder with wheels"):
        gpu_check.main(["--wheels", str(tmp_path)])


def test_a_line_that_was_cut_off_is_no_row() -> None:
    row = Row("a", "1", "2", False)
    assert read_row(row.to_line()) == row
    assert read_row('{"name": "b", "va') is None


def test_a_part_that_takes_too_long_keeps_its_rows_and_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_part(monkeypatch, SAY + "say(Row('first', '7'))\nimport signal; signal.pause()")
    monkeypatch.setitem(gpu_check.PARTS, "golden", gpu_check.PARTS["golden"]._replace(most_s=0.01))
    has_come, append = threading.Event(), gpu_check.append_line

    def append_and_tell(path: Path, part: str, row: Row) -> None:
        append(path, part, row)
        if part == "golden":
            has_come.set()

    class AfterFirstRow(threading.Timer):
        def __init__(self, _seconds: float, kill: Callable[[], None]) -> None:
            super().__init__(0.0, lambda: has_come.wait(60) and kill())

    monkeypatch.setattr(gpu_check, "append_line", append_and_tell)
    monkeypatch.setattr(threading, "Timer", AfterFirstRow)
    rows = [("golden", "first", "7"), ("golden", "golden", "not done in 0 s")]
    assert check_parts(tmp_path, "golden") == rows


def test_a_fraction_is_judged_by_the_least_that_is_wanted() -> None:
    assert judge("x", 0.85, 0.85, "y") == Row("x", "85% (y)", "at least 85%", True)
    assert judge("x", 0.84, 0.85, "y").is_ok is False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_parts_that_a_cpu_can_run_do() -> None:
    from quire.tools.gpu.correctness import check_crowds, check_first_answer

    rows: list[Row] = []
    check_first_answer(rows.append, device="cpu")
    check_crowds(rows.append, device="cpu", sizes=(1, 9))
    assert len(rows) == 2 + 2 * (2 + 1)
    assert all(row.is_ok for row in rows)


def test_every_part_names_a_function_and_has_no_more_than_a_command_may_on_a_lent_machine() -> None:
    for part in gpu_check.PARTS.values():
        assert callable(getattr(import_module(f"quire.tools.gpu.{part.module}"), part.function))
        assert part.most_s <= 600


def test_a_part_has_no_more_than_what_is_left_of_half_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_find_missing_gpu", lambda: None)
    left: list[float] = []
    clock = iter(range(0, 100_000, 300))
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(gpu_check, "_run_part", lambda _name, timeout_s, _out: left.append(timeout_s) or [])
    gpu_check.main([])
    rest = (1750.0 - 300 * (number + 1) for number in range(len(gpu_check.PARTS)))
    assert left == [min(part.most_s, s) for part, s in zip(gpu_check.PARTS.values(), rest, strict=True)]


def test_kernels_are_judged_by_the_ceilings_and_a_shape_that_is_missing_has_failed() -> None:
    ceilings = {"copy_bytes_per_s": 1000.0, "bf16_flops_per_s": 500.0}
    names = ("decode 64 x 4096", "8b decode 64 x 4096", "decode 1 x 2048")
    rows = [
        {"op": "paged attention", "shape": name, "seconds": seconds, "num_bytes": 85, "num_flops": 1}
        for name, seconds in zip(names, (0.1, 0.11, 9.0), strict=True)
    ]
    judged = judge_report({"ceilings": ceilings, "rows": rows})
    assert [row.is_ok for row in judged] == [True, False, None, False]
    assert (judged[0].value[:3], judged[0].wanted) == ("85%", "at least 85%")
    assert judged[3] == Row("8b prefill 8192", "not measured", "done", False)
    rows.append({**rows[0], "shape": "8b prefill 8192", "num_flops": 26})
    assert [row.is_ok for row in judge_report({"ceilings": ceilings, "rows": rows})][3] is True


def test_every_file_of_kernel_tests_is_there() -> None:
    from quire.tools.gpu import kernel_tests

    for pattern in (*kernel_tests._TEST_FILES, *kernel_tests._MEMCHECK_FILES):
        assert list((ROOT / "tests").glob(pattern)), pattern


def test_memcheck_without_its_tool_has_failed_and_with_it_runs_the_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from quire.tools.gpu import kernel_tests

    rows: list[Row] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(kernel_tests, "_CUDA_FOLDER", tmp_path)
    kernel_tests.check_memory(rows.append)
    assert rows[-1].is_ok is False
    assert "no compute-sanitizer" in rows[-1].value
    # A tool that finds an error in what passes otherwise.
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nprint('ERROR SUMMARY: 1 error', *sys.argv[1:])\nsys.exit(66)\n"
    )
    tool.chmod(0o755)
    kernel_tests.check_memory(rows.append, ["kernels/test_triton_sample.py"])
    assert rows[-1].name == "memcheck test_triton_sample.py"
    assert rows[-1].is_ok is False
    assert "ERROR SUMMARY: 1 error --tool memcheck --error-exitcode 66" in rows[-1].value


def test_a_profile_says_what_ran_and_what_did_not() -> None:
    from quire.tools.gpu.profiler import Span, explain_spans

    work = StepWork(weight_bytes=4_800_000, kv_bytes=480_000, flops=0, attention_flops=0, num_launches=2)
    spans = [Span("nvjet_gemm", 0, 2), Span("_paged_attention_kernel", 1, 4), Span("_rms_norm", 8, 10)]
    rows = {row.name: row.value for row in explain_spans("x", spans, 1, work, CARDS["h200"])}
    assert rows["x, idle"] == "40% of 0.010 ms, the longest gap 4 us, 3 kernels a step"
    assert rows["x, products"] == "2 us a step, floor 1 us (50%)"
    assert rows["x, attention"] == "3 us a step, floor 0 us (3%)"
    assert rows["x, other kernels"] == "2 us a step"
    assert rows["x: _rms_norm"] == "1 a step, 2.0 us each, 33%"


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", None),
    ],
)
def test_a_card_is_known_by_the_drivers_name(name: str, card: str | None) -> None:
    found = find_known_card(name)
    assert (None if found is None else found.name) == card


def test_a_step_is_judged_by_the_estimate() -> None:
    work = StepWork(weight_bytes=4_800_000_000, kv_bytes=0, flops=0, attention_flops=0, num_launches=0)
    row = judge_step("a", 1.4e-3, work, CARDS["h200"], 1.2)
    assert row.value == "1.40 ms; floor 1.00 (71%), estimate 1.18 (1.19x)"
    assert row.is_ok
    assert judge_step("a", 1.5e-3, work, CARDS["h200"], 1.2).is_ok is False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_faults_are_brought_about_on_a_cpu_too() -> None:
    from quire.tools.gpu.faults import check_faults

    rows: list[Row] = []
    check_faults(rows.append, device="cpu")
    assert len(rows) == 5
    assert all(row.is_ok for row in rows), rows


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_and_engines_are_timed_on_a_cpu_too() -> None:
    from quire.tools.gpu.engine import bench_small_engine
    from quire.tools.gpu.profiler import profile_steps

    rows: list[Row] = []
    profile_steps(rows.append, device="cpu", model="tiny", scale=64)
    assert [row.name for row in rows if row.name.endswith("step")] == [
        f"{name}, step" for name in ("decode 1", "decode 4", "mixed 2 + 6", "prefill 32", "prefill 128")
    ]
    bench_small_engine(rows.append, device="cpu", model="tiny", batches=((1, 99.0),))
    assert sum("ms; floor" in row.value for row in rows) == 5 + 1
