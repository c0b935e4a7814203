"""How a worker imports torch, in a process of its own: here it has been imported."""

from __future__ import annotations

import subprocess
import sys

# `_prims` is what only the meta kernels import. What comes behind them fails without them, or with them where
# a module is loaded twice on the way.
_SCRIPT = """
from quire.worker.torch_import import import_torch, load_meta_kernels
import_torch()
import sys, torch
from quire.worker import worker
assert "torch._prims" not in sys.modules
assert (torch.ones(2, 3) @ torch.ones(3, 4)).sum() == 24

load_meta_kernels()
assert torch.Generator().manual_seed(3).initial_seed() == 3
assert torch.vmap(torch.sin)(torch.zeros(3)).sum() == 0
torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2))
assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)) == 0
with torch.device("meta"):
    assert torch.nn.functional.embedding(torch.zeros(2).long(), torch.ones(3, 4)).is_meta
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.embedding(torch.zeros(2).long(), torch.ones(3, 4)).shape == (2, 4)
"""


def test_meta_kernels_come_only_when_they_are_wanted_and_then_nothing_fails() -> None:
    subprocess.run([sys.executable, "-P", "-c", _SCRIPT], check=True, timeout=120)
