"""The table of compiled kernels (tools/gpu/variants.py) is what serving launches; what spills is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

TABLE = Path(__file__).parent / "compiled_kernels.json"
SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
_TIMEOUT_S = 280.0
pytestmark = pytest.mark.timeout(_TIMEOUT_S + 20)

_COUNT = """
import json
from collections import Counter
from quire.tools.gpu.variants import CASES, record_case
print(json.dumps({name: Counter(one.name for one in record_case(case, 90)) for name, case in CASES.items()}))
"""
_COMPILE = """
import json, sys
from quire.tools.gpu.variants import CASES, compile_case
print(json.dumps(compile_case(CASES[sys.argv[1]], int(sys.argv[2]))))
"""


def run(script: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> Any:
    """In a process of its own, because Triton decides at its import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_serving_launches_as_many_variants_as_the_table_has() -> None:
    table = json.loads(TABLE.read_text())
    wanted = {
        name: {kernel: row["variants"] for kernel, row in own["sm_90"].items()} for name, own in table.items()
    }
    assert run(_COUNT) == wanted


def test_no_kernel_of_the_table_spills_and_all_fit_their_card() -> None:
    for name, cards in json.loads(TABLE.read_text()).items():
        assert cards.keys() == SHARED_BYTES.keys()
        for card, kernels in cards.items():
            for kernel, row in kernels.items():
                assert row["shared_bytes"] <= SHARED_BYTES[card], (name, card, kernel)
                assert row["spills"] == 0, (name, card, kernel)
            assert kernels["_paged_attention_kernel"]["copies_in_flight"] >= 2, (name, card)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("architecture", ["80", "89", "90", "100"])
@pytest.mark.parametrize("name", list(json.loads(TABLE.read_text())))
def test_the_table_is_what_the_compiler_makes(name: str, architecture: str) -> None:
    wanted = json.loads(TABLE.read_text())[name][f"sm_{architecture}"]
    found = run(_COMPILE, name, architecture, timeout_s=1800)
    assert found.keys() == wanted.keys()
    for kernel, row in found.items():
        assert row["spills"] <= wanted[kernel]["spills"], (kernel, row)
        assert row["copies_in_flight"] >= wanted[kernel]["copies_in_flight"], (kernel, row)
