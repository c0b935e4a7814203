"""docs/performance.md: every part well-formed, and what a bench prints becomes one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from quire.ipc.errors import InputError
from quire.tools.bench.cli import run
from quire.tools.bench.performance import FACTS, PAGE, PARTS, render, run_performance
from quire.tools.gpu.page import PART as GPU_PART

PRINTED = """\
date      2026-01-02 03:04 UTC
cpu       Some CPU, 2 cores usable
load      0.1 0.2 0.3 (1, 5, 15 minutes before the run)
versions  torch 2.13.0
quire     0.1.0, commit abc1234
command   quire bench core --steps 20

a step, ms                schedule  both | p99
------------------------  --------  ----------
256 running                  0.029       0.347
fair, newcomers of other         -       0.290
all rounds: 1
medians of 20 decode steps; fake worker, no sockets, no stop strings

process  RSS MB
-------  ------
core         72
"""


def find_parts(page: str) -> dict[str, str]:
    return dict(re.findall(r"^<!-- begin (\w+).*?-->\n(.*?)<!-- end \1 -->$", page, re.M | re.S))


def check_part(text: str) -> None:
    """A table or more, whose rows have as many cells as its head, and where it comes from."""
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    assert tables
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
        assert len(table.splitlines()) >= 3
    last = text.strip().splitlines()[-1]
    assert re.match(r"Measured by `quire bench [^`]+`: ", last)
    for fact in FACTS[:-1]:
        assert f"{fact} " in last


def test_every_part_of_the_page_is_well_formed() -> None:
    parts = find_parts(PAGE.read_text(encoding="utf-8"))
    assert list(parts) == [*PARTS, GPU_PART]
    for name in PARTS:
        check_part(parts[name])


def test_what_a_bench_prints_becomes_tables_notes_and_where_it_was_measured() -> None:
    text = render(PRINTED)
    check_part(text)
    assert (
        "| a step, ms | schedule | both \\| p99 |\n| --- | --- | --- |\n| 256 running | 0.029 | 0.347 |"
        in text
    )
    assert "\nmedians of 20 decode steps; fake worker, no sockets, no stop strings\n" in text
    assert "\nall rounds: 1\n" in text
    assert "| core | 72 |" in text


@pytest.mark.parametrize("printed", ["", PRINTED.split("\n\n")[0], PRINTED.split("\n\n", 1)[1]])
def test_what_has_no_table_or_no_machine_is_no_part(printed: str) -> None:
    with pytest.raises(ValueError, match="a bench that prints"):
        render(printed)


def test_one_command_measures_a_part_and_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    shutil.copy(PAGE, page)
    assert run(["performance", "--quick", "--part", "core", "--page", str(page)]) == 0
    before, after = (find_parts(one.read_text(encoding="utf-8")) for one in (PAGE, page))
    check_part(after["core"])
    assert "--steps 20" in after["core"]
    assert {name: text for name, text in after.items() if name != "core"} == {
        name: text for name, text in before.items() if name != "core"
    }


def test_a_part_whose_peer_is_missing_stays_and_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page = tmp_path / "performance.md"
    shutil.copy(PAGE, page)
    assert run_performance(["offline_tiny"], page, is_quick=True, has_peers=True) == 1
    assert page.read_text() == PAGE.read_text()
    assert "vllm is not installed" in capsys.readouterr().err
    with pytest.raises(InputError, match="page"):
        run_performance(["core"], tmp_path / "none.md", is_quick=True, has_peers=False)
