"""What is said of each thing that Triton can lack: one line, with what to do."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest
import torch
from quire.kernels.triton import triton_faults, triton_runtime
from quire.kernels.triton.triton_faults import explain, find_missing

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError("libcuda.so cannot found!\nPlease make sure GPU is set up"), "libcuda.so is missing"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "a C compiler is missing"),
        (RuntimeError("0 active drivers ([]). There should only be one."), "Triton finds no driver"),
        (RuntimeError("[CUDA]: PTX was compiled with an unsupported toolchain"), "NVIDIA's driver is older"),
        (RuntimeError("CUDA error: no kernel image is available"), "this torch or Triton was not"),
        (KeyError("sm_130"), "KeyError: 'sm_130'"),
        (ValueError(), "ValueError"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_with_what_to_do(error: Exception, said: str) -> None:
    text = explain(error)
    assert text.startswith(said)
    assert "\n" not in text
    assert len(text) <= 300


def test_missing_headers_are_told_from_a_broken_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    error = subprocess.CalledProcessError(1, ["gcc", "main.c"])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert explain(error) == (
        f"Python.h is missing in /nowhere: install Python's headers (apt install python{version}-dev)"
    )
    monkeypatch.setenv("CC", "mycc")
    assert explain(FileNotFoundError("mycc")) == "CC=mycc is no program: set CC to a C compiler"


def test_an_old_card_and_an_old_triton_are_found_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    said = find_missing(torch.device("cuda"))
    assert said == "Tesla T4 has compute capability 7.5, and they need 8.0: a newer card would be faster"
    assert find_missing(CPU) is None
    monkeypatch.setattr(triton, "__version__", "3.1.0")
    assert find_missing(CPU) == "Triton 3.1.0 is too old: pip install 'triton>=3.6'"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert find_missing(CPU) == "Triton is not installed: pip install triton"


@pytest.mark.parametrize("kind", ["TritonError", "AssertionError", "OSError"])
def test_no_error_of_the_first_kernel_ends_the_worker(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    made = {
        "TritonError": errors.PTXASError("ptxas has died"),
        "AssertionError": AssertionError("libcuda.so cannot found!"),
        "OSError": OSError("no space left on device"),
    }[kind]

    def fail(*_: torch.Tensor) -> None:
        raise made

    monkeypatch.setattr(triton_runtime, "DEVICE_TYPES", {"cpu"})
    monkeypatch.setattr("quire.kernels.program.gather_rows_triton.launch_gather_rows", fail)
    triton_runtime.find_fault.cache_clear()
    try:
        assert not triton_runtime.can_use_triton(CPU)
        assert not triton_runtime.can_use_triton(CPU)
    finally:
        triton_runtime.find_fault.cache_clear()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "Triton's kernels are off, slower torch operations take their place"
    ]  # said once
    assert triton_faults.explain(made) in caplog.records[0].message
