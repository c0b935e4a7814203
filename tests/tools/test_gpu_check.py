"""tools/gpu_check without a GPU: what it refuses and how it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quire.tools import gpu_check
from quire.tools.gpu.rows import Row, RowFile, judge

ROOT = Path(__file__).parents[2]


def fake_part(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Every part is this script; sys.argv[1] names the part, sys.argv[2] the file for its rows."""
    monkeypatch.setattr(gpu_check, "_find_missing_gpu", lambda: None)
    real_run = subprocess.run

    def run(command: list[str], **options: object) -> object:
        options["stdout"] = subprocess.DEVNULL
        return real_run([sys.executable, "-c", script, *command[-2:]], **options)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)


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
    "import sys\nfrom pathlib import Path\nfrom quire.tools.gpu.rows import Row, RowFile\n"
    "say = RowFile(Path(sys.argv[2])).append\n"
)


def test_a_part_that_fails_keeps_its_rows_and_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_part(monkeypatch, SAY + "say(Row('first', '7', '7', True)); raise RuntimeError('illegal address')")
    assert gpu_check.main(["--json", "--part", "golden", "--part", "graphs"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert list(report["parts"]) == ["golden", "graphs"]
    first, end, seconds = report["parts"]["graphs"]
    assert first == {"name": "first", "value": "7", "wanted": "7", "is_ok": True}
    assert end["value"] == "ended with code 1: RuntimeError: illegal address"
    assert seconds["name"] == "graphs, seconds"


def test_a_part_without_its_modules_has_failed_and_says_how_to_bring_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_part(monkeypatch, "import a_module_that_nobody_has")
    assert gpu_check.main(["--part", "golden"]) == 1
    said = capsys.readouterr().out
    assert "not run: no module 'a_module_that_nobody_has'; --wheels FOLDER" in said


def test_rows_are_written_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_part(monkeypatch, SAY + "say(Row('first', '7', '7', True)); raise RuntimeError('gone')")
    out = tmp_path / "rows.jsonl"
    assert gpu_check.main(["--part", "golden", "--part", "graphs", "--out", str(out)]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["part"], row["name"]) for row in rows] == [
        ("golden", "first"),
        ("golden", "golden"),
        ("graphs", "first"),
        ("graphs", "graphs"),
    ]
    assert "  first: 7" in capsys.readouterr().err


def test_a_part_for_which_no_time_is_left_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_find_missing_gpu", lambda: None)
    assert gpu_check.main(["--part", "golden", "--total-s", "0"]) == 1
    assert "not run: no time is left" in capsys.readouterr().out


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a folder with wheels"):
        gpu_check.main(["--wheels", str(tmp_path)])


def test_no_part_takes_longer_than_a_command_may_on_a_lent_machine() -> None:
    assert max(gpu_check.PARTS.values()) <= 600


def test_rows_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows")
    assert rows.read() == []
    rows.append(Row("a", "1", "2", False))
    with (tmp_path / "rows").open("a") as file:
        file.write('{"name": "b", "va')
    assert rows.read() == [Row("a", "1", "2", False)]


def test_a_fraction_is_judged_by_the_least_that_is_wanted() -> None:
    assert judge("x", 0.85, 0.85, "y") == Row("x", "85% (y)", "at least 85%", True)
    assert judge("x", 0.84, 0.85, "y").is_ok is False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_parts_that_a_cpu_can_run_do() -> None:
    from quire.tools.gpu.correctness import check_crowds, check_first_answer

    rows: list[Row] = []
    check_first_answer(rows.append, device="cpu")
    check_crowds(rows.append, device="cpu", sizes=(1, 3))
    assert len(rows) == 2 + 2 * 2
    assert all(row.is_ok for row in rows)
