"""What a GPU's step without graphs asks of the host, counted with Triton's own binder and no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from quire.tools.bench.cli import run

LAYERS = 28
pytestmark = pytest.mark.timeout(300)


def test_the_bench_has_both_ways_and_a_step_six_launches_a_layer_and_two_uploads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counts.json"
    assert run(["launches", "--batch", "8", "--steps", "3", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "Triton's launcher, decode" in said
    records = json.loads(file.read_text())
    assert [(one["way"], one["name"]) for one in records] == [
        *(("triton", "decode"), ("triton", "mixed"), ("direct", "decode"), ("direct", "mixed"))
    ]
    assert records[0]["slow_launches"] == records[0]["launches"] == records[2]["launches"]
    decode, mixed = records[2:]
    # Two norms, rotation, attention, its combination, activation; a plan, the last norm, sampling, embedding.
    assert decode["launches"] == 6 * LAYERS + 5
    assert mixed["launches"] == 7 * LAYERS + 5  # chunks have an attention of their own
    for step in (decode, mixed):
        assert step["slow_launches"] == 0  # none through Triton's Python
        assert step["products"] == 4 * LAYERS + 1
        assert step["uploads"] == 2  # the step's numbers, and what sampling computes with
