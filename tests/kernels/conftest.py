"""Variants of the attention kernels; Triton's interpreter, if it is what runs the GPU kernels here."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator

import pytest
from quire.kernels.linear.linear import Variant, find_variants

_ATTENTION_VARIANTS = ["amx", "avx512_bf16", "widened"]

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import triton_interpreter


@pytest.fixture(params=list(Variant), ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Variant:
    """A variant of the linear kernels."""
    if request.param not in find_variants(library):
        pytest.skip("this processor has no such instructions")
    return request.param


@pytest.fixture
def force_attention(library: ctypes.CDLL) -> Iterator[Callable[[str], None]]:
    """Takes one variant of bfloat16 attention; its head sizes are multiples of 32."""

    def force(variant: str) -> None:
        index = _ATTENTION_VARIANTS.index(variant)
        library.quire_force_attention_variant(index)
        if library.quire_attention_variant(32) != index:
            pytest.skip(f"this processor has no {variant}")

    yield force
    library.quire_force_attention_variant(0)


@pytest.fixture
def triton_kernels() -> None:
    pytest.importorskip("triton")


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's products are added in one order whatever is beside it, as on a GPU: numpy's BLAS may not."""
    if "triton_interpreter" in sys.modules:
        builder = triton_interpreter.interpreter.InterpreterBuilder
        monkeypatch.setattr(builder, "create_dot", triton_interpreter.multiply_in_order)
