"""How a worker imports torch, in a process of its own: here it has been imported."""

from __future__ import annotations

import subprocess
import sys

# `_prims` is what only the meta kernels import.
_SCRIPT = """
from quire.worker.torch_import import import_torch, load_meta_kernels
import_torch()
import sys, torch
from quire.worker import worker
assert "torch._prims" not in sys.modules
assert (torch.ones(2, 3) @ torch.ones(3, 4)).sum() == 24

load_meta_kernels()
assert "torch._prims" in sys.modules
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.embedding(torch.zeros(2).long(), torch.ones(3, 4)).shape == (2, 4)
"""


def test_meta_kernels_come_only_when_they_are_wanted() -> None:
    subprocess.run([sys.executable, "-P", "-c", _SCRIPT], check=True, timeout=120)
