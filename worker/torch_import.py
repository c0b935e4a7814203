"""Imports torch without its meta kernels, which take a quarter of the import. They compute shapes for tracing
(torch.compile, FakeTensor), which nothing here does on a CPU.

Without them torch.Generator, the device "meta" and torch.func fail, and an import of torch._dynamo: before it
uses any of these, and before it loads code that is not ours, a worker calls load_meta_kernels. Nothing then
differs from a plain import.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"
_LEFT_OUT = ModuleType(_META_KERNELS)


def import_torch() -> None:
    """Import torch without its meta kernels, unless it is imported already. Raises as the import does."""
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = _LEFT_OUT
    importlib.import_module("torch")


def load_meta_kernels() -> None:
    """Import the meta kernels after all: for random weights, a GPU's libraries and an operator's code."""
    if sys.modules.get(_META_KERNELS) is _LEFT_OUT:
        del sys.modules[_META_KERNELS]
        importlib.import_module(_META_KERNELS)
