"""How a worker imports torch, in a process of its own: here it has been imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

# `_prims` is what only the meta kernels import.
_START = """
from quire.worker.torch_import import import_torch, load_meta_kernels
import_torch()
import sys, torch
from quire.worker import worker
assert "torch._prims" not in sys.modules
assert (torch.ones(2, 3) @ torch.ones(3, 4)).sum() == 24
"""
_TRACES = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.embedding(torch.zeros(2).long(), torch.ones(3, 4)).shape == (2, 4)
"""


@pytest.mark.parametrize(
    "use",
    [
        'load_meta_kernels()\nassert "torch._prims" in sys.modules',
        "load_meta_kernels()\nassert torch.Generator().manual_seed(3).initial_seed() == 3",
        'assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)) == 0',
    ],
)
def test_meta_kernels_come_only_when_they_are_wanted(use: str) -> None:
    script = f"{_START}{use}\n{_TRACES}"
    subprocess.run([sys.executable, "-P", "-c", script], check=True, timeout=120)


def test_what_traces_brings_the_meta_kernels() -> None:
    subprocess.run([sys.executable, "-P", "-c", _START + _TRACES], check=True, timeout=120)
