"""The part of tools/gpu_check about FlashInfer, by a stand-in and Triton's interpreter."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
import torch
from quire.kernels.triton import triton_runtime
from quire.tools.gpu import flashinfer
from quire.tools.gpu.rows import Row

pytest.importorskip("triton_interpreter")
pytestmark = pytest.mark.slow


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in, and a compiler for it."""
    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(fake_flashinfer, "__spec__", importlib.machinery.ModuleSpec("flashinfer", None))
    fake_flashinfer.put_compiler(tmp_path, monkeypatch)


def check(**options: Any) -> list[Row]:
    rows: list[Row] = []
    flashinfer.check_flashinfer(rows.append, device="cpu", scale=512, model="tiny", **options)
    return rows


def test_without_it_the_part_has_failed_and_says_what_to_install() -> None:
    assert check() == [
        Row("FLASHINFER", "not run: it is not installed: pip install flashinfer-python", "done", False)
    ]


@pytest.mark.usefixtures("installed")
def test_without_a_compiler_the_part_has_failed_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    [row] = check()
    assert row.is_ok is False
    assert "no nvcc to compile its kernels" in row.value


@pytest.mark.usefixtures("installed")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_compared_with_float32_and_timed_beside_ours() -> None:
    *rows, target, engine, one, many = check()
    assert [row.name for row in rows] == [
        "FLASHINFER decode",
        "FLASHINFER mixed",
        "FLASHINFER mixed, window 128",
        "FLASHINFER mixed, soft cap 30",
        "FLASHINFER decode, replayed",
        "FLASHINFER mixed, replayed",
        "FLASHINFER decode 64 x 4096",
        "FLASHINFER decode 1 x 8192",
        "FLASHINFER prefill 1 x 8192",
    ]
    assert [row.is_ok for row in rows] == [True] * 6 + [None] * 3, rows
    assert target.name == "targets"
    # The stand-in is in this process only, and the engine's worker says that it has none.
    assert engine == Row("FLASHINFER in an engine", "attention is native's", "its own", False)
    assert "batch 1, step, attention by native" in one.name
    assert "batch 64, step, attention by native" in many.name


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_one_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper
    run = wrapper.run

    def run_badly(self: Any, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        out = run(self, q, paged_kv_cache)
        out[-1] *= 1.5 if self.window_left < 0 else torch.nan
        return out

    monkeypatch.setattr(wrapper, "run", run_badly)
    monkeypatch.setattr(flashinfer, "_FAST", ())
    monkeypatch.setattr(flashinfer, "bench_attention_backend", lambda *_: None)
    found = {row.name: row.is_ok for row in check()}
    assert not found["FLASHINFER decode"]
    assert not found["FLASHINFER mixed, window 128"]
