"""torch without its meta kernels, which take a quarter of its import: they find shapes for who traces a
program (torch.compile, FakeTensor), as nothing here does on a CPU. Imports torch only when it is told to.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"
_LEFT_OUT = ModuleType(_META_KERNELS)


def import_torch() -> None:
    """Import it without its meta kernels, unless it is here. Raises as the import."""
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = _LEFT_OUT
    importlib.import_module("torch")


def load_meta_kernels() -> None:
    """Have them after all, before anything traces: libraries for GPUs, and an operator's own code, may."""
    if sys.modules.get(_META_KERNELS) is _LEFT_OUT:
        del sys.modules[_META_KERNELS]
        importlib.import_module(_META_KERNELS)
