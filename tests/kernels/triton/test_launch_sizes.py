"""Arithmetic of grids and blocks: Triton's results, without its cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire import kernels
from quire.kernels.triton.launch_sizes import ceil_div, next_power_of_2


def test_sizes_are_those_that_triton_finds() -> None:
    triton = pytest.importorskip("triton")
    for count in [*range(1, 300), 4095, 4096, 4097, 151936, (1 << 40) + 1]:
        assert next_power_of_2(count) == triton.next_power_of_2(count)
        for size in (1, 2, 7, 64, 2048):
            assert ceil_div(count, size) == triton.cdiv(count, size)
    assert ceil_div(0, 64) == 0


def test_no_launcher_calls_tritons_slow_functions() -> None:
    [folder] = kernels.__path__
    texts = {path.name: path.read_text() for path in Path(folder).glob("*.py")}
    assert [name for name, text in texts.items() if "triton.cdiv" in text or "triton.next_pow" in text] == []
