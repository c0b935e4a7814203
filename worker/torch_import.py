"""Imports torch without its meta kernels, which take a quarter of the import. They compute shapes for tracing
(torch.compile, FakeTensor), which nothing here does on a CPU. An import of what traces brings them first.

torch.Generator needs them since torch 2.13 without any import: call load_meta_kernels before.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType

_META_KERNELS = "torch._meta_registrations"
_LEFT_OUT = ModuleType(_META_KERNELS)
# Packages of torch that import meta kernels, or that import these in a circle unless meta kernels come first.
_TRACING = ("_decomp", "_dynamo", "_functorch", "_inductor", "_prims", "_refs", "_subclasses", "export")


class _TracingFinder(MetaPathFinder):
    """Finds nothing itself: it has the meta kernels loaded before what needs them is looked for."""

    def find_spec(self, fullname: str, *_where: object) -> None:
        if fullname.startswith("torch.") and fullname.split(".")[1] in _TRACING:
            load_meta_kernels()


_FINDER = _TracingFinder()


def import_torch() -> None:
    """Import torch without its meta kernels, unless it is imported already. Raises as the import does."""
    if "torch" not in sys.modules:
        sys.modules[_META_KERNELS] = _LEFT_OUT
        importlib.import_module("torch")
        sys.meta_path.insert(0, _FINDER)


def load_meta_kernels() -> None:
    """Import the meta kernels after all, for what traces without an import of its own."""
    if sys.modules.get(_META_KERNELS) is _LEFT_OUT:
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        del sys.modules[_META_KERNELS]
        importlib.import_module(_META_KERNELS)
