"""Which implementation runs where: the whole table, for a CPU and for a GPU that need not be there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quire.kernels import choice
from quire.kernels.choice import choose_attention, choose_kernel, choose_linear, choose_norm
from quire.kernels.program import native
from quire.kernels.triton import triton_runtime

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FOLDER = Path(choice.__file__).parent


@pytest.fixture(autouse=True)
def _all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "find_fault", lambda _device_type: None)
    monkeypatch.setattr(native, "load_library", lambda: object())


def test_the_table_names_every_file_of_a_kernel() -> None:
    files = {path.name.removesuffix("_triton.py") for path in FOLDER.rglob("*_triton.py")}
    named = {name for name, kinds in choice._IMPLEMENTATIONS.items() if "triton" in kinds}
    # Attention goes with its plan and what writes the cache's layout, linear layers with narrow ones.
    shared = {"attention_plan", "rotate_and_write", "narrow_linear", "dependent_launch"}
    assert named | shared == files
    named = {name for name, kinds in choice._IMPLEMENTATIONS.items() if "native" in kinds}
    assert {path.stem for path in FOLDER.rglob("*.cpp")} >= named


@pytest.mark.parametrize("operation", choice._IMPLEMENTATIONS)
def test_a_device_gets_what_there_is_for_it(operation: str) -> None:
    kinds = choice._IMPLEMENTATIONS[operation]
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_kernel(operation, dtype, CPU) == ("native" if "native" in kinds else "torch")
    assert choose_kernel(operation, torch.float16, CPU) == "torch"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert choose_kernel(operation, dtype, GPU) == ("triton" if "triton" in kinds else "torch")


def test_without_compilers_torch_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "find_fault", lambda _device_type: "no C compiler")
    monkeypatch.setattr(native, "load_library", lambda: None)
    for operation in choice._IMPLEMENTATIONS:
        assert choose_kernel(operation, torch.bfloat16, CPU) == "torch"
        assert choose_kernel(operation, torch.bfloat16, GPU) == "torch"


def test_a_gpu_multiplies_with_triton_where_rows_must_be_exact_or_weights_are_packed() -> None:
    assert choose_linear(torch.bfloat16, GPU, None, is_strict=False) == "torch"
    assert choose_linear(torch.bfloat16, GPU, None, is_strict=True) == "triton"
    assert choose_linear(torch.bfloat16, GPU, "int8", is_strict=False) == "triton"
    assert choose_linear(torch.bfloat16, CPU, "int8", is_strict=False) == "native"
    assert choose_linear(torch.float16, CPU, "int8", is_strict=True) == "torch"
    assert choose_linear(torch.bfloat16, CPU, "narrow", is_strict=False) == "native"
    assert choose_linear(torch.bfloat16, GPU, "narrow", is_strict=True) == "triton"


def test_heads_and_rows_that_a_kernel_does_not_cover_go_to_the_next() -> None:
    pytest.importorskip("triton")
    assert choose_attention(8, 2, 64, torch.bfloat16, CPU) == "native"
    assert choose_attention(8, 2, 60, torch.bfloat16, CPU) == "torch"
    assert choose_attention(8, 2, 640, torch.bfloat16, CPU) == "native"
    assert choose_attention(8, 2, 648, torch.bfloat16, CPU) == "torch"
    assert choose_attention(8, 2, 64, torch.bfloat16, GPU) == "triton"
    assert choose_attention(8, 2, 320, torch.bfloat16, GPU) == "torch"
    assert choose_norm(4096, torch.bfloat16, GPU) == "triton"
    assert choose_norm(1 << 20, torch.bfloat16, GPU) == "torch"
    assert choose_norm(1 << 20, torch.bfloat16, CPU) == "native"
